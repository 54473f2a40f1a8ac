"""From logits to tokens, on the device.

Order: adjust (penalties, held-back stop tokens, biases) -> greedy, or temperature -> top_k -> top_p -> min_p -> sample.
Everything is a function of one row alone: (logits, parameters, seed, sequence length). So a seeded request gets the same
tokens alone or in any batch, whatever SamplingMode that batch runs in.

top_k and top_p need no sort: both keep the tokens whose probability reaches a threshold, and the threshold is found by
bisection over the bits of float32, 31 passes of compare-and-sum over [R, V], exact to the last bit. Ties at the threshold
are all kept (as Transformers does for top_k).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.executor.row_params import RowParams
from jaxserve.types import UNLIMITED_TOP_K

_INF_BITS = 0x7F800000  # float32 infinity; non-negative floats order like their bits


class SamplingMode(enum.Enum):
    """What some row of a step needs; each is a compiled program. Every mode does all that the ones before it do.

    The host chooses, not a `lax.cond`: a GPU would wait for the whole step before it could take a branch.
    """

    GREEDY = enum.auto()
    DRAW = enum.auto()  # temperature
    LIMITED = enum.auto()  # top_k, top_p or min_p
    EVERYTHING = enum.auto()  # penalties, biases, held-back stop tokens, logprobs

    @staticmethod
    def of(*, draws: bool, limits: bool, everything: bool) -> SamplingMode:
        if everything:
            return SamplingMode.EVERYTHING
        return (SamplingMode.LIMITED if limits else SamplingMode.DRAW) if draws else SamplingMode.GREEDY


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampledTokens:
    """R rows of a step. K is the most top logprobs a request may ask for."""

    next_token_ids: jax.Array  # int32 [R], -1 where the logits hold a NaN
    logprobs: jax.Array | None = None  # float32 [R]; None but in SamplingMode.EVERYTHING, as the next two
    top_ids: jax.Array | None = None  # int32 [R, K]
    top_logprobs: jax.Array | None = None  # float32 [R, K]


def sample(logits: jax.Array, params: RowParams, seq_lens: jax.Array, mode: SamplingMode) -> jax.Array:
    """Adjusted logits float32 [R, V] -> token ids int32 [R]; -1 for rows whose logits hold a NaN."""
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if mode is not SamplingMode.GREEDY:
        drawn = _draw(logits, params, seq_lens, has_limits=mode is not SamplingMode.DRAW)
        tokens = jnp.where(params.temperature > 0, drawn, tokens)
    return jnp.where(jnp.isnan(jnp.max(logits, axis=-1)), -1, tokens)


def _draw(logits: jax.Array, params: RowParams, seq_lens: jax.Array, has_limits: bool) -> jax.Array:
    temperature = jnp.where(params.temperature > 0, params.temperature, 1.0)
    scaled = logits / temperature[:, None]
    kept = jnp.where(_kept_tokens(jax.nn.softmax(scaled, axis=-1), params), scaled, -jnp.inf) if has_limits else scaled
    return jnp.argmax(kept + _gumbel(params, seq_lens, logits.shape[1]), axis=-1).astype(jnp.int32)


def _kept_tokens(probs: jax.Array, params: RowParams) -> jax.Array:
    """bool [R, V]: the tokens that survive top_k, then top_p of what is left, then min_p."""
    top_k = jnp.minimum(params.top_k, UNLIMITED_TOP_K)[:, None]

    def enough_tokens(threshold: jax.Array) -> jax.Array:
        return jnp.sum(probs >= threshold, axis=-1, keepdims=True, dtype=jnp.int32) >= top_k

    k_threshold = jnp.where(top_k < probs.shape[1], _largest_threshold(enough_tokens, probs.shape[0]), 0.0)
    kept = jnp.where(probs >= k_threshold, probs, 0.0)
    wanted_mass = params.top_p[:, None] * jnp.sum(kept, axis=-1, keepdims=True)

    def enough_mass(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(kept >= threshold, kept, 0.0), axis=-1, keepdims=True) >= wanted_mass

    p_threshold = jnp.where(params.top_p[:, None] < 1, _largest_threshold(enough_mass, probs.shape[0]), 0.0)
    min_p_threshold = params.min_p[:, None] * jnp.max(probs, axis=-1, keepdims=True)
    return (kept > 0) & (kept >= p_threshold) & (kept >= min_p_threshold)


def _largest_threshold(holds: Callable[[jax.Array], jax.Array], num_rows: int) -> jax.Array:
    """float32 [R, 1]: per row the largest threshold t >= 0 with holds(t). `holds` is true at 0 and falls as t grows."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # holds(low), not holds(high)
        middle = low + (high - low) // 2
        ok = holds(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

    low = jnp.zeros((num_rows, 1), jnp.int32)
    high = jnp.full((num_rows, 1), _INF_BITS, jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, high))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def _gumbel(params: RowParams, seq_lens: jax.Array, vocab_size: int) -> jax.Array:
    """float32 [R, V] noise from counter-based keys: a function of the row's seed and the position it samples for."""

    def noise(seed_low: jax.Array, seed_high: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(jnp.stack([seed_high, seed_low]).astype(jnp.uint32), impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32)

    return jax.vmap(noise)(params.seed_low, params.seed_high, seq_lens)


def logprobs_of(logits: jax.Array, tokens: jax.Array, num_top: int) -> SampledTokens:
    """Logprobs of the model's own distribution: `logits` float32 [R, V] as the model gave them, before any adjustment."""
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=-1) - normalizer
    values, ids = jax.lax.top_k(logits, num_top)
    return SampledTokens(tokens, chosen[:, 0], ids.astype(jnp.int32), values - normalizer)
