"""GLM-4 of both kinds."""

from __future__ import annotations

from model_families.case import Case, Served, rope

# Its config has a padding token, which must be in the vocabulary.
_GLM = {"pad_token_id": None}
_MOST = rope("default", partial_rotary_factor=0.75)

CASES: dict[str, Case] = {
    "glm": Case("Glm", {**_GLM, "head_dim": 32, "num_attention_heads": 8}),
    "glm-plain": Case("Glm", {**_GLM, "attention_bias": False, "num_key_value_heads": 1, "rope_parameters": _MOST}),
    "glm4": Case("Glm4", {**_GLM, "num_key_value_heads": 4, "vocab_size": 503, "intermediate_size": 88}),
    "glm4-most": Case("Glm4", {**_GLM, "rope_parameters": _MOST, "tie_word_embeddings": True, "attention_bias": False}),
}
LIVE = [
    Served("glm4", page_size=16, chunk=32, tp=2, mixed=True),
]
IN_PROCESS = [
    Served("glm", page_size=64, chunk=64, tp=4, overlap=False, in_matrix=True),
]
