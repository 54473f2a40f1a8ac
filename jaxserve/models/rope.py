"""Rotary position embeddings: frequencies of every supported kind. `kernels.rotary` applies them to q and k.

Knows a RopeConfig and positions; not who owns the tokens. Frequencies are computed in float32 with the operations Transformers
uses, because at position 100,000 the last bit of a frequency is visible in the angle.

Dynamic NTK scaling depends on a sequence's length, which a ragged batch with a prefix cache cannot use: a cached key would
have to change when its sequence grows. Here a token's own position stands for the length: position p rotates as in a sequence
of p + 1 tokens. Up to max_position_embeddings that is no scaling at all, beyond it is what Transformers computes for a token
when it is generated; only prompts that are themselves longer than max_position_embeddings differ.

LongRoPE has two sets of factors, for sequences within the original context and beyond it. For the same reason one set rotates
all sequences of a server: the short factors if none can outgrow the original context (`RopeConfig.for_context`), else the long.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.rope_config import RopeConfig


def rope_cos_sin(
    positions: jax.Array, rope: RopeConfig, head_dim: int, max_position_embeddings: int
) -> tuple[jax.Array, jax.Array]:
    """Positions int32 [T] -> cos and sin, float32 [T, head_dim / 2]."""
    position, rotated = positions.astype(jnp.float32)[:, None], rope.rotated(head_dim)
    if rope.kind == "dynamic":
        angles = position * _dynamic_frequencies(position, rope, rotated, max_position_embeddings)
    else:
        angles = position * frequencies(rope, rotated)
    factor = attention_factor(rope)
    cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    if rotated == head_dim:
        return cos, sin
    behind = (0, 0), (0, (head_dim - rotated) // 2)  # what is not rotated is not stretched, either
    return jnp.pad(cos, behind, constant_values=1), jnp.pad(sin, behind)


def frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of heads (or their rotated part), float32 [head_dim / 2], for every kind whose frequencies do not
    depend on the position."""
    plain = np.float32(1) / np.float32(rope.theta) ** _exponents(head_dim)
    if rope.kind == "linear":
        return plain / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    if rope.kind == "longrope":
        stretch = np.asarray(rope.short_factor if rope.is_short else rope.long_factor, np.float32)
        return np.float32(1) / (stretch * np.float32(rope.theta) ** _exponents(head_dim))
    assert rope.kind == "default", rope.kind
    return plain


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied with: 1, except for YaRN (https://arxiv.org/abs/2309.00071, section 3.4) and LongRoPE
    (https://arxiv.org/abs/2402.13753)."""
    if rope.kind == "longrope":
        return _longrope_attention_factor(rope)
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    given = rope.short_mscale if rope.is_short else rope.long_mscale
    given = rope.attention_factor if given is None else given
    if given is not None:
        return given
    assert rope.original_max_len is not None
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_len)) if rope.factor > 1 else 1.0


def _exponents(head_dim: int) -> np.ndarray:
    return np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)


def _dynamic_frequencies(position: jax.Array, rope: RopeConfig, head_dim: int, max_len: int) -> jax.Array:
    """float32 [T, head_dim / 2]: the base grows with the tokens beyond max_len (see the module's docstring)."""
    seq_len = jnp.maximum(position + 1, max_len)
    growth = (rope.factor * seq_len / max_len - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    return 1.0 / (rope.theta * growth) ** _exponents(head_dim)


def _llama3(plain: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1 model card)."""
    assert rope.original_max_len is not None
    turns = rope.original_max_len * plain / np.float32(2 * math.pi)  # within the original context
    width = max(rope.high_freq_factor - rope.low_freq_factor, 1e-6)  # Llama 4 blends nothing: both are 1
    keep = np.clip((turns - rope.low_freq_factor) / width, 0, 1)
    return ((1 - keep) * plain / rope.factor + keep * plain).astype(np.float32)


def _yarn(plain: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Blends stretched and plain frequencies by how often a dimension turns within the original context."""
    original_len = rope.original_max_len
    assert original_len is not None

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(original_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    stretch = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / np.float32(width), 0, 1)
    return (plain / np.float32(rope.factor) * stretch + plain * (1 - stretch)).astype(np.float32)
