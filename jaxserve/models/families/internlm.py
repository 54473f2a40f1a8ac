"""InternLM 2 (and 2.5) and InternLM 3: Llama with names of its own, and then with biases that are chosen apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Family, FamilyTraits, read_attention, read_dense_mlp, read_norm, required_int
from jaxserve.models.specs import LayerSpec
from jaxserve.models.tensor_names import Packed, TensorNames

_INTERNLM2_NAMES = TensorNames(
    renamed=(
        ("embed_tokens", "tok_embeddings"),
        ("self_attn", "attention"),
        ("o_proj", "wo"),
        ("mlp", "feed_forward"),
        ("gate_proj", "w1"),
        ("down_proj", "w2"),
        ("up_proj", "w3"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("lm_head", "output"),
    )
)
_INTERNLM3_DEFAULTS = {"rms_norm_eps": 1e-5}


def read_internlm2(raw: Mapping[str, Any]) -> FamilyTraits:
    bias = bool(raw.get("bias", True))
    attention = read_attention(raw, qkv_bias=bias, o_bias=bias)
    layer = LayerSpec(mixer=attention, mlp=read_dense_mlp(raw), norm=read_norm(raw))
    # The query heads of a key/value head, then its key and its value.
    wqkv = Packed("wqkv", ("q_proj", "k_proj", "v_proj"), groups=attention.num_kv_heads)
    names = dataclasses.replace(_INTERNLM2_NAMES, packed=(wqkv,))
    return FamilyTraits((layer,) * required_int(raw, "num_hidden_layers"), tensor_names=names)


def read_internlm3(raw: Mapping[str, Any]) -> FamilyTraits:
    # The second names are those that Transformers writes.
    qkv_bias = bool(raw.get("qkv_bias", raw.get("attention_bias", False)))
    bias = bool(raw.get("bias", raw.get("mlp_bias", False)))
    layer = LayerSpec(
        mixer=read_attention(raw, qkv_bias=qkv_bias, o_bias=bias), mlp=read_dense_mlp(raw, bias=bias), norm=read_norm(raw)
    )
    return FamilyTraits((layer,) * required_int(raw, "num_hidden_layers"))


FAMILIES = (
    Family("InternLM2ForCausalLM", "internlm2", read_internlm2),
    Family("InternLM3ForCausalLM", "internlm3", read_internlm3, _INTERNLM3_DEFAULTS),
)
