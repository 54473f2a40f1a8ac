"""The model families: each a function from config.json to `FamilyTraits`, its layers and what else it decides.

What the families share is read in `common` and in `jaxserve.models.config`. Adding a family whose layers the block kinds can
compute means adding one short function and one row of `FAMILIES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.models.families.common import FamilyTraits, required_int
from jaxserve.models.families.gemma import GEMMA2_DEFAULTS, GEMMA3_DEFAULTS, read_gemma2, read_gemma3
from jaxserve.models.families.llama import read_llama, read_mistral
from jaxserve.models.families.qwen import read_qwen2, read_qwen3
from jaxserve.models.families.qwen_moe import read_qwen3_moe

__all__ = ["FAMILIES", "Family", "FamilyTraits", "find_family", "required_int"]


@dataclasses.dataclass(frozen=True)
class Family:
    architecture: str  # as in config.json's `architectures`
    model_type: str  # as in config.json's `model_type`, for files without `architectures`
    read: Callable[[Mapping[str, Any]], FamilyTraits]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of keys that published files leave out


FAMILIES = (
    Family("LlamaForCausalLM", "llama", read_llama),
    Family("MistralForCausalLM", "mistral", read_mistral),
    Family("Qwen2ForCausalLM", "qwen2", read_qwen2),
    Family("Qwen3ForCausalLM", "qwen3", read_qwen3),
    Family("Gemma2ForCausalLM", "gemma2", read_gemma2, GEMMA2_DEFAULTS),
    Family("Gemma3ForCausalLM", "gemma3_text", read_gemma3, GEMMA3_DEFAULTS),
    Family("Gemma3ForConditionalGeneration", "gemma3", read_gemma3, GEMMA3_DEFAULTS),  # its text part
    Family("Qwen3MoeForCausalLM", "qwen3_moe", read_qwen3_moe),
)


def find_family(raw: Mapping[str, Any]) -> Family:
    """The family of a config.json object. Raises ValueError that lists the known ones."""
    architectures = raw.get("architectures") or ()
    for family in FAMILIES:
        if family.architecture in architectures or (not architectures and family.model_type == raw.get("model_type")):
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    if architectures:
        raise ValueError(f"architecture {', '.join(map(repr, architectures))} is not supported; supported: {known}.")
    raise ValueError(f"model_type {raw.get('model_type')!r} (no architectures given) is not supported; supported: {known}.")
