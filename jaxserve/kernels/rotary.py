"""What happens to queries, keys and values between their projection and the attention: norms, rotation, quantization."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import jax.typing

# Rows whose largest magnitude is less count as zero: 448 over anything larger is a finite float32.
ZERO_BELOW = 2.0**-100


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotary:
    """How queries and keys are normed and rotated before they meet."""

    cos: jax.Array  # float32 [T, D / 2]
    sin: jax.Array
    q_norm: jax.Array | None = None  # [D] weights of a root-mean-square norm over each head
    k_norm: jax.Array | None = None
    eps: float = dataclasses.field(default=1e-6, metadata={"static": True})


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32; the product with the weight is in x's type, as in Transformers."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * (wide * scale).astype(x.dtype)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates [T, H, D] by cos and sin [T, D / 2]: dimension i pairs with i + D / 2, as in Hugging Face checkpoints."""
    cos, sin = cos[:, None], sin[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def split_and_rotate(qkv: jax.Array, rotary: Rotary | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[T, Hkv, G + 2, D], a KV head's G queries, its key and its value -> q [T, Hkv * G, D], k and v [T, Hkv, D]."""
    T, _, _, D = qkv.shape
    q, k, v = qkv[:, :, :-2].reshape(T, -1, D), qkv[:, :, -2], qkv[:, :, -1]
    if rotary is None:
        return q, k, v
    if rotary.q_norm is not None:
        assert rotary.k_norm is not None
        q, k = rms_norm(q, rotary.q_norm, rotary.eps), rms_norm(k, rotary.k_norm, rotary.eps)
    with jax.named_scope("rope"):
        return apply_rope(q, rotary.cos, rotary.sin), apply_rope(k, rotary.cos, rotary.sin), v


def quantized_max(dtype: jax.typing.DTypeLike) -> float:
    """What a row's largest magnitude becomes. Raises ValueError for a type that we do not store keys and values in."""
    name = jnp.dtype(dtype).name
    if name not in ("float8_e4m3fn", "int8"):
        raise ValueError(f"keys and values are quantized to float8_e4m3fn or int8, not to {name}")
    return 448.0 if name == "float8_e4m3fn" else 127.0


def quantize_rows(x: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """x [..., D] -> values [..., D] in float8_e4m3fn or int8, and float32 scales [...]: x is nearly values * scale.

    The scale is the row's largest magnitude over the type's, and 1 for a row of zeros; values are rounded to nearest even.
    A row with a NaN or an infinity does not read back as finite: its scale is NaN or infinite. (Times 0, either gives NaN. What
    int8 holds for a NaN is the platform's choice, so an infinite row of int8 may also hold infinities.)
    """
    largest = quantized_max(dtype)
    wide = x.astype(jnp.float32)
    peak = jnp.max(jnp.abs(wide), axis=-1)
    is_zero = peak < ZERO_BELOW
    values = wide * (largest / jnp.where(is_zero, largest, peak))[..., None]
    if jnp.issubdtype(dtype, jnp.integer):
        values = jnp.round(values)
    return values.astype(dtype), jnp.where(is_zero, 1.0, peak * jnp.float32(1 / largest))
