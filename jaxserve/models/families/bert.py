"""BERT, RoBERTa (XLM-RoBERTa, CamemBERT) and DistilBERT: encoders with vectors for positions and norms behind each addition.

RoBERTa's positions begin behind the id of padding. DistilBERT has no types of tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    read_attention,
    read_dense_mlp,
    read_layer_norm,
    repeated,
    required_int,
)
from jaxserve.models.rope_config import NO_ROPE
from jaxserve.models.specs import EmbeddingSpec, LayerSpec
from jaxserve.models.tensor_names import TensorNames

DEFAULTS: dict[str, Any] = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2}
ROBERTA_DEFAULTS: dict[str, Any] = {**DEFAULTS, "pad_token_id": 1}
DISTIL_BERT_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}
_EMBEDDING_NAMES = (
    ("embed_tokens", "embeddings.word_embeddings"),
    ("embed_positions", "embeddings.position_embeddings"),
    ("embed_types", "embeddings.token_type_embeddings"),
    ("embed_norm", "embeddings.LayerNorm"),
)
_NAMES = TensorNames(
    (
        *_EMBEDDING_NAMES,
        ("layers", "encoder.layer"),
        ("self_attn.q_proj", "attention.self.query"),
        ("self_attn.k_proj", "attention.self.key"),
        ("self_attn.v_proj", "attention.self.value"),
        ("self_attn.o_proj", "attention.output.dense"),
        ("post_attention_layernorm", "attention.output.LayerNorm"),
        ("mlp.up_proj", "intermediate.dense"),
        ("mlp.down_proj", "output.dense"),
        ("post_feedforward_layernorm", "output.LayerNorm"),
    )
)
_DISTIL_NAMES = TensorNames(
    (
        *_EMBEDDING_NAMES,
        ("layers", "transformer.layer"),
        ("self_attn.q_proj", "attention.q_lin"),
        ("self_attn.k_proj", "attention.k_lin"),
        ("self_attn.v_proj", "attention.v_lin"),
        ("self_attn.o_proj", "attention.out_lin"),
        ("post_attention_layernorm", "sa_layer_norm"),
        ("mlp.up_proj", "ffn.lin1"),
        ("mlp.down_proj", "ffn.lin2"),
        ("post_feedforward_layernorm", "output_layer_norm"),
    )
)


def read_bert(raw: Mapping[str, Any]) -> FamilyTraits:
    return _read(raw, EmbeddingSpec(token_types=required_int(raw, "type_vocab_size")), _NAMES)


def read_roberta(raw: Mapping[str, Any]) -> FamilyTraits:
    pad = raw["pad_token_id"]
    if type(pad) is not int or pad < 0:
        raise ValueError(f"pad_token_id must be a whole number of at least 0, behind which positions begin; got {pad!r}.")
    return _read(raw, EmbeddingSpec(position_offset=pad + 1, token_types=required_int(raw, "type_vocab_size")), _NAMES)


def read_distil_bert(raw: Mapping[str, Any]) -> FamilyTraits:
    return _read(raw, EmbeddingSpec(), _DISTIL_NAMES)


def refuse_decoder(raw: Mapping[str, Any]) -> None:
    """ValueError if config.json makes an encoder's family a decoder."""
    for name in ("is_decoder", "add_cross_attention", "causal"):
        if raw.get(name):
            raise ValueError(f"{name} must be false: of this model family only encoders are supported.")


def _read(raw: Mapping[str, Any], embedding: EmbeddingSpec, names: TensorNames) -> FamilyTraits:
    refuse_decoder(raw)
    kind = raw.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ValueError(f"position_embedding_type must be 'absolute', got {kind!r}: relative positions are not supported.")
    norm = read_layer_norm(raw, "layer_norm_eps", bias=True)
    layer = LayerSpec(
        mixer=read_attention(raw, rope=NO_ROPE, is_causal=False, qkv_bias=True, o_bias=True),
        mlp=read_dense_mlp(raw, is_gated=False, bias=True),
        norm=norm,
        norms_inputs=False,
        norms_sums=True,
    )
    embedding = dataclasses.replace(embedding, num_positions=required_int(raw, "max_position_embeddings"), norm=norm)
    return repeated(raw, layer, embedding=embedding, has_final_norm=False, tensor_names=names)


FAMILIES = (
    Family("BertModel", "bert", read_bert, DEFAULTS),
    Family("RobertaModel", "roberta", read_roberta, ROBERTA_DEFAULTS),
    Family("XLMRobertaModel", "xlm-roberta", read_roberta, ROBERTA_DEFAULTS),
    Family("CamembertModel", "camembert", read_roberta, ROBERTA_DEFAULTS),
    Family("DistilBertModel", "distilbert", read_distil_bert, DEFAULTS, DISTIL_BERT_KEYS),
)
