"""Bamba: most layers are Mamba 2, some attend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    read_activation,
    read_attention,
    read_dense_mlp,
    read_head_dim,
    read_norm,
    required_int,
)
from jaxserve.models.rope_config import read_partial_rope
from jaxserve.models.specs import LayerSpec, Mamba2Spec
from jaxserve.models.tensor_names import TensorNames

MAMBA_DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_NAMES = TensorNames(
    renamed=(
        ("post_attention_layernorm", "pre_ff_layernorm"),
        ("mlp", "feed_forward"),
        ("model.norm", "model.final_layernorm"),
    )
)


def read_bamba(raw: Mapping[str, Any]) -> FamilyTraits:
    bias, attending = bool(raw.get("attention_bias", False)), list(raw.get("attn_layer_indices") or ())
    attention = read_attention(raw, rope=read_partial_rope(raw, read_head_dim(raw), 0.5), qkv_bias=bias, o_bias=bias)
    mamba, mlp = read_mamba2(raw), read_dense_mlp(raw, bias=bool(raw.get("mlp_bias", False)))
    num_layers = required_int(raw, "num_hidden_layers")
    if not set(attending) & set(range(num_layers)):
        raise ValueError(
            f"attn_layer_indices must name at least one layer of num_hidden_layers={num_layers}, got {attending!r}."
        )
    layers = tuple(
        LayerSpec(mixer=attention if index in attending else mamba, mlp=mlp, norm=read_norm(raw)) for index in range(num_layers)
    )
    return FamilyTraits(layers, tensor_names=_NAMES)


def read_mamba2(raw: Mapping[str, Any]) -> Mamba2Spec:
    num_heads, inner = required_int(raw, "mamba_n_heads"), required_int(raw, "mamba_expand") * required_int(raw, "hidden_size")
    given = raw.get("mamba_d_head", "auto")
    head_dim = inner // num_heads if given in ("auto", None) else required_int(raw, "mamba_d_head")
    if num_heads * head_dim != inner:
        raise ValueError(f"mamba_n_heads={num_heads} times mamba_d_head={head_dim} must be mamba_expand * hidden_size={inner}.")
    least, most = map(_number, raw.get("time_step_limit") or (0.0, float("inf")))
    return Mamba2Spec(
        num_heads=num_heads,
        head_dim=head_dim,
        state_dim=required_int(raw, "mamba_d_state"),
        num_groups=required_int(raw, "mamba_n_groups"),
        conv_size=required_int(raw, "mamba_d_conv"),
        conv_bias=bool(raw["mamba_conv_bias"]),
        proj_bias=bool(raw["mamba_proj_bias"]),
        least_step=least,
        most_step=most,
        act=read_activation(raw),
        norm=read_norm(raw),
    )


def _number(value: Any) -> float:
    """Transformers writes an infinity as {"__float__": "Infinity"}."""
    return float(value["__float__"] if isinstance(value, Mapping) else value)


FAMILIES = (Family("BambaForCausalLM", "bamba", read_bamba, MAMBA_DEFAULTS),)
