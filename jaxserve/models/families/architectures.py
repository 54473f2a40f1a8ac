"""Names of architectures: a family's own, and what its checkpoints are called without its output head or with another head."""

from __future__ import annotations

GENERATING = ("ForCausalLM", "ForConditionalGeneration")
# What stands behind a family's name where nothing is generated. ForMaskedLM: an encoder, whose head is left out.
ENDINGS = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForProcessRewardModel",
    "ForRewardModel",
    "Model",
)


def split_architecture(name: str) -> tuple[str, str]:
    """The family's name and the ending; "" if it is none of those above."""
    ending = next((ending for ending in (*GENERATING, *ENDINGS) if name.endswith(ending)), "")
    return name.removesuffix(ending), ending


def is_relative(name: str, architecture: str, model_type: str) -> bool:
    """Whether `name` is the family of `architecture` and `model_type` with another head or none: Qwen3Model, and
    Gemma3TextModel by its model_type, gemma3_text."""
    family, ending = split_architecture(name)
    same_type = family.lower() == model_type.replace("_", "").lower()
    return ending in ENDINGS and (same_type or family == split_architecture(architecture)[0])
