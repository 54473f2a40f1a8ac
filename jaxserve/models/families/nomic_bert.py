"""NomicBERT: BERT with rotary positions, gated MLPs and no biases but in norms.

config.json has GPT-2's names for keys, where Transformers has not written it anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.bert import refuse_decoder
from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    read_attention,
    read_dense_mlp,
    read_layer_norm,
    repeated,
    required_int,
)
from jaxserve.models.specs import EmbeddingSpec, LayerSpec
from jaxserve.models.tensor_names import Packed, TensorNames

DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "layer_norm_eps": 1e-12, "rope_theta": 1000.0, "type_vocab_size": 2}
KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
_GATED = {"swiglu": "silu", "geglu": "gelu"}  # activation_function of older files -> hidden_act
# What older files may ask for and the layers cannot: key -> its only value.
_FIXED: dict[str, Any] = {
    "prenorm": False,
    "parallel_block": False,
    "use_rms_norm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1,
    "rotary_emb_interleaved": False,
    "rotary_scaling_factor": None,
    "moe_every_n_layers": 0,
}
_NAMES = TensorNames(
    renamed=(
        ("embed_tokens", "embeddings.word_embeddings"),
        ("embed_types", "embeddings.token_type_embeddings"),
        ("embed_norm", "emb_ln"),
        ("layers", "encoder.layers"),
        ("self_attn", "attn"),
        ("o_proj", "out_proj"),
        ("post_attention_layernorm", "norm1"),
        ("up_proj", "fc11"),
        ("gate_proj", "fc12"),
        ("down_proj", "fc2"),
        ("post_feedforward_layernorm", "norm2"),
    ),
    packed=(Packed("Wqkv", ("q_proj", "k_proj", "v_proj")),),
)


def read_nomic_bert(raw: Mapping[str, Any]) -> FamilyTraits:
    refuse_decoder(raw)
    for name, value in _FIXED.items():
        if raw.get(name) not in (None, value):
            raise ValueError(f"{name} must be {json.dumps(value)} for this model family, got {raw[name]!r}.")
    norm = read_layer_norm(raw, "layer_norm_eps", bias=True)
    layer = LayerSpec(
        mixer=read_attention(raw, is_causal=False),
        mlp=read_dense_mlp({**raw, "hidden_act": _activation(raw)}),
        norm=norm,
        norms_inputs=False,
        norms_sums=True,
    )
    types = required_int(raw, "type_vocab_size") if raw.get("type_vocab_size") else 0
    embedding = EmbeddingSpec(token_types=types, norm=norm)
    return repeated(raw, layer, embedding=embedding, has_final_norm=False, tensor_names=_NAMES)


def _activation(raw: Mapping[str, Any]) -> str:
    act = raw.get("activation_function")
    if act is None:
        return str(raw["hidden_act"])
    if act not in _GATED:
        raise ValueError(f"activation_function must be one of {', '.join(_GATED)}, of an MLP with a gate; got {act!r}.")
    return _GATED[act]


FAMILIES = (Family("NomicBertModel", "nomic_bert", read_nomic_bert, DEFAULTS, KEYS),)
