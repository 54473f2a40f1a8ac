"""What a family is, what it answers with, and how config.json spells what most families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.models.rope_config import read_rope
from jaxserve.models.specs import DenseMLPSpec, EmbeddingSpec, LayerSpec, NormSpec, SelfAttentionSpec
from jaxserve.models.tensor_names import LLAMA_NAMES, TensorNames

_ALIASES = {"swish": "silu", "gelu_python": "gelu", "gelu_fast": "gelu_pytorch_tanh"}


@dataclasses.dataclass(frozen=True)
class FamilyTraits:
    """What a family decides."""

    layers: tuple[LayerSpec, ...]
    has_final_norm: bool = True  # like those of the layers
    embedding: EmbeddingSpec = dataclasses.field(default_factory=EmbeddingSpec)
    embedding_scale: float = 1.0
    scales_given_embeddings: bool = False  # with that, too: embeddings that come in place of tokens
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    lm_head_bias: bool = False
    lm_head_has_unit_rows: bool = False
    tensor_names: TensorNames = LLAMA_NAMES


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture."""

    architecture: str  # as in config.json's `architectures`
    model_type: str  # as in config.json's `model_type`, for files without `architectures`
    read: Callable[[Mapping[str, Any]], FamilyTraits]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of keys that published files leave out
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what files may call a key -> its usual name


def renamed(raw: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """config.json with the usual names of keys (`Family.keys`). A value under the usual name goes first, unless it is null."""
    usual = {keys[key]: value for key, value in raw.items() if key in keys}
    own = {key: value for key, value in raw.items() if key not in keys and (value is not None or key not in usual)}
    return {**usual, **own}


def read_attention(raw: Mapping[str, Any], *, default_head_dim: int | None = None, **traits: Any) -> SelfAttentionSpec:
    """Heads, head_dim and rope as config.json has them, scale 1 / sqrt(head_dim); `traits` replaces or adds fields.

    default_head_dim None: hidden_size / heads.
    """
    num_heads, head_dim = required_int(raw, "num_attention_heads"), read_head_dim(raw, default_head_dim)
    fields: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": raw.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "scale": float(head_dim**-0.5),
    }
    if "rope" not in traits:
        fields["rope"] = read_rope(raw)
    return SelfAttentionSpec(**{**fields, **traits})


def read_head_dim(raw: Mapping[str, Any], default: int | None = None) -> int:
    """default None: hidden_size / heads."""
    if raw.get("head_dim"):
        return required_int(raw, "head_dim")
    return default or required_int(raw, "hidden_size") // required_int(raw, "num_attention_heads")


def read_dense_mlp(raw: Mapping[str, Any], **traits: Any) -> DenseMLPSpec:
    """`traits` adds fields."""
    return DenseMLPSpec(intermediate_size=required_int(raw, "intermediate_size"), act=read_activation(raw), **traits)


def read_activation(raw: Mapping[str, Any]) -> str:
    act = str(raw.get("hidden_act") or "silu")
    return _ALIASES.get(act, act)


def read_norm(raw: Mapping[str, Any]) -> NormSpec:
    return NormSpec(eps=float(raw.get("rms_norm_eps", 1e-6)))


def read_layer_norm(raw: Mapping[str, Any], eps: str, **traits: Any) -> NormSpec:
    """`eps` is the key's name."""
    return NormSpec(eps=float(raw.get(eps, 1e-5)), subtracts_mean=True, **traits)


def with_windows(layer: LayerSpec, windows: Sequence[int | None]) -> tuple[LayerSpec, ...]:
    """A layer like `layer` for each window."""
    return tuple(with_mixer(layer, window=window) for window in windows)


def with_mixer(layer: LayerSpec, **changes: Any) -> LayerSpec:
    """The same layer but for these fields of its mixer."""
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **changes))


def repeated(raw: Mapping[str, Any], layer: LayerSpec, **traits: Any) -> FamilyTraits:
    """All layers are like this one."""
    return FamilyTraits((layer,) * required_int(raw, "num_hidden_layers"), **traits)


def read_sliding(raw: Mapping[str, Any], pattern: int) -> tuple[bool, ...]:
    """Per layer whether it has a window: layer_types, or all but every `pattern`-th."""
    if raw.get("layer_types") is not None:
        return tuple(kind == "sliding_attention" for kind in read_layer_types(raw))
    return tuple((layer + 1) % pattern != 0 for layer in range(required_int(raw, "num_hidden_layers")))


def read_rotating(raw: Mapping[str, Any]) -> tuple[bool, ...]:
    """Per layer: no_rope_layers, whose 1 stands for a layer that does rotate, or all but every no_rope_layer_interval-th."""
    num_layers, listed = required_int(raw, "num_hidden_layers"), raw.get("no_rope_layers")
    if listed:
        if len(listed) < num_layers:
            raise ValueError(f"no_rope_layers must have num_hidden_layers={num_layers} entries, got {len(listed)}.")
        return tuple(map(bool, listed[:num_layers]))
    interval = required_int({"no_rope_layer_interval": 4, **raw}, "no_rope_layer_interval")
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def required_int(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
    return value


def first_int(raw: Mapping[str, Any], *names: str) -> int:
    """Of the first of `names` that config.json has, which it must."""
    return required_int(raw, next((name for name in names if raw.get(name) is not None), names[0]))


def read_layer_types(raw: Mapping[str, Any], kinds: Sequence[str] = ("full_attention", "sliding_attention")) -> tuple[str, ...]:
    """Per layer one of `kinds`."""
    num_layers, layer_types = required_int(raw, "num_hidden_layers"), tuple(raw["layer_types"])
    if len(layer_types) != num_layers:
        raise ValueError(f"layer_types must have num_hidden_layers={num_layers} entries, got {len(layer_types)}.")
    for kind in layer_types:
        if kind not in kinds:
            raise ValueError(f"layer_types may hold {' and '.join(kinds)}, got {kind!r}.")
    return layer_types
