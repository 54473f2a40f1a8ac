"""tunix' models in Hugging Face's names: which tensors of a checkpoint each of their arrays is.

The inverse of what their loaders do (tunix/models/*/params*.py), for Llama 3, Qwen 2 and 3, and Gemma 2 and 3 without images.
Knows neither tunix nor an engine. D is the hidden size; there are N heads of size H and E experts.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp

from jaxserve.models.leaf_names import Array, Target, Tensor

_LORA_A, _LORA_B = "_lora_a", "_lora_b"


def out_of_heads(weight: jax.Array) -> jax.Array:
    """[N, H, D], or [in, out] -> [D, N * H]."""
    return weight.reshape(-1, weight.shape[-1]).T


def into_heads(weight: jax.Array) -> jax.Array:
    """[D, N, H] -> [N * H, D]."""
    return weight.reshape(weight.shape[0], -1).T


def by_heads(weight: jax.Array) -> jax.Array:
    """[N, D, H] -> [N * H, D]."""
    return weight.transpose(0, 2, 1).reshape(-1, weight.shape[1])


@dataclasses.dataclass(frozen=True)
class Part:
    """Computes of one of the arrays that are stacked. Equal ones are one to jit: layers share programs."""

    index: int
    compute: Callable[[jax.Array], jax.Array]

    def __call__(self, stacked: jax.Array) -> jax.Array:
        return self.compute(stacked[self.index])


_MODEL: dict[str, Target] = {
    "embedder.input_embedding": "model.embed_tokens.weight",
    "final_norm.w": "model.norm.weight",
    "final_norm.scale": "model.norm.weight",
    "lm_head.w": ("lm_head.weight", out_of_heads),
}
_LAYER: dict[str, Target] = {
    "input_layernorm.w": "input_layernorm.weight",
    "post_attention_layernorm.w": "post_attention_layernorm.weight",
    **{f"attn.{x}_proj.w": (f"self_attn.{x}_proj.weight", into_heads) for x in "qkv"},
    **{f"attn.{x}_bias": f"self_attn.{x}_proj.bias" for x in "qkv"},
    **{f"attn.{x}_norm.w": f"self_attn.{x}_norm.weight" for x in "qk"},
    "attn.o_proj.w": ("self_attn.o_proj.weight", out_of_heads),
    **{f"mlp.{x}_proj.kernel": (f"mlp.{x}_proj.weight", out_of_heads) for x in ("gate", "up", "down")},
    "mlp.router.kernel": ("mlp.gate.weight", out_of_heads),
    **{f"mlp.{x}_proj": (f"mlp.experts.*.{x}_proj.weight", out_of_heads) for x in ("gate", "up", "down")},  # [E, in, out]
    # Gemma
    "pre_attention_norm.scale": "input_layernorm.weight",
    "post_attn_norm.scale": "post_attention_layernorm.weight",
    "post_attention_norm.scale": "post_attention_layernorm.weight",
    "pre_ffw_norm.scale": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.scale": "post_feedforward_layernorm.weight",
    "attn._query_norm.scale": "self_attn.q_norm.weight",
    "attn._key_norm.scale": "self_attn.k_norm.weight",
    "attn.q_einsum.w": ("self_attn.q_proj.weight", by_heads),
    "attn.kv_einsum.w": [(f"self_attn.{x}_proj.weight", Part(i, by_heads)) for i, x in enumerate("kv")],
    "attn.qkv_einsum.w": [(f"self_attn.{x}_proj.weight", Part(i, by_heads)) for i, x in enumerate("qkv")],
    "attn.attn_vec_einsum.w": ("self_attn.o_proj.weight", out_of_heads),
}


def mapping_of(names: Iterable[str]) -> dict[str, Target]:
    """For `Engine.update_weights`: of a whole model's arrays, called `names`, those that are known here."""
    patterns = {re.sub(r"\.\d+\.", ".*.", name) for name in names}
    known = _MODEL | {f"layers.*.{name}": _of_layer(target) for name, target in _LAYER.items()}
    return {name: target for name, target in known.items() if name in patterns}


def _of_layer(target: Target) -> Target:
    if isinstance(target, list):
        return [_tensor_of_layer(tensor) for tensor in target]
    return None if target is None else _tensor_of_layer(target)


def _tensor_of_layer(tensor: Tensor) -> Tensor:
    prefix = "model.layers.*."
    return prefix + tensor if isinstance(tensor, str) else (prefix + tensor[0], tensor[1])


def with_lora(base: Mapping[str, Array], lora: Mapping[str, Array], scaling: float) -> dict[str, Array]:
    """The arrays of `base` with qwix' LoRA matrices [..., R] and [R, ...] added to them, times `scaling` (alpha / rank)."""
    merged = dict(base)
    for name, a in lora.items():
        if name.endswith(_LORA_A):
            of = name.removesuffix(_LORA_A)
            if of not in base:
                raise ValueError(f"{name} needs {of}, which the model does not have.")
            weight, b = base[of], lora[of + _LORA_B]
            if (*a.shape[:-1], *b.shape[1:]) != weight.shape:
                raise ValueError(f"LoRA of {of} {weight.shape} must keep the order of its axes; got {a.shape} and {b.shape}.")
            merged[of] = _merged(weight, a, b, scaling)
    return merged


def is_lora(name: str) -> bool:
    return name.endswith((_LORA_A, _LORA_B))


# `scaling` is static: as an argument it would be copied from the host, which tunix forbids while weights are handed over.
@functools.partial(jax.jit, static_argnames="scaling")
def _merged(weight: Array, a: Array, b: Array, scaling: float) -> jax.Array:
    return jnp.asarray(weight + scaling * jnp.tensordot(a, b, axes=1), weight.dtype)
