"""From logits to tokens, on the device.

Order: adjust (penalties, held-back stop tokens, biases) -> greedy, or temperature -> top_k -> top_p -> min_p -> sample.
Everything is a function of one row alone: (logits, parameters, seed, sequence length). So a seeded request gets the same
tokens alone or in any batch, whatever SamplingMode that batch runs in.

top_k and top_p need no sort: both keep the tokens whose probability reaches a threshold, and the threshold is found digit by
digit in the bits of float32: ten passes of compare-and-sum over [R, V], each for seven thresholds at once, exact to the last
bit. Ties at the threshold are all kept (as Transformers does for top_k).
"""

from __future__ import annotations

import dataclasses
import enum

import jax
import jax.numpy as jnp

from jaxserve.executor.row_params import RowParams
from jaxserve.runner import BROKEN_LOGITS, NO_CANDIDATES
from jaxserve.types import UNLIMITED_TOP_K

# Non-negative floats order like their bits, and those of probabilities lie below 2.0's, 1 << 30.
_THRESHOLD_BITS, _DIGIT_BITS = 30, 3


class SamplingMode(enum.Enum):
    """What some row of a step needs; each is a compiled program. Every mode does all that the ones before it do.

    The host chooses, not a `lax.cond`: a GPU would wait for the whole step before it could take a branch.
    """

    GREEDY = enum.auto()
    DRAW = enum.auto()  # temperature
    LIMITED = enum.auto()  # top_k, top_p or min_p
    MASKED = enum.auto()  # tokens that a grammar forbids
    EVERYTHING = enum.auto()  # penalties, biases, held-back stop tokens, logprobs

    @staticmethod
    def of(*, draws: bool, limits: bool, everything: bool) -> SamplingMode:
        """What the parameters ask for; masks come on top of it (`with_masks`)."""
        if everything:
            return SamplingMode.EVERYTHING
        return (SamplingMode.LIMITED if limits else SamplingMode.DRAW) if draws else SamplingMode.GREEDY

    @property
    def with_masks(self) -> SamplingMode:
        return self if self.takes_masks else SamplingMode.MASKED

    @property
    def takes_masks(self) -> bool:
        return self in (SamplingMode.MASKED, SamplingMode.EVERYTHING)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampledTokens:
    """Of R rows, K tokens each; M is the most top logprobs a request may ask for. See StepOutput."""

    token_ids: jax.Array  # int32 [R, K]
    num_tokens: jax.Array | None = None  # int32 [R]; None where nothing drafts: one for each row that wants one
    logprobs: jax.Array | None = None  # float32 [R, K]; None but in SamplingMode.EVERYTHING, as the next two
    top_ids: jax.Array | None = None  # int32 [R, K, M]
    top_logprobs: jax.Array | None = None  # float32 [R, K, M]
    drafts: jax.Array | None = None  # int32 [R, D]; None where nothing drafts

    def by_rows(self, num_rows: int, tokens_per_row: int) -> SampledTokens:
        """Lines [R * K, ...] as [R, K, ...]."""
        return jax.tree.map(lambda x: x.reshape(num_rows, tokens_per_row, *x.shape[1:]), self)


def sample(logits: jax.Array, params: RowParams, seq_lens: jax.Array, mode: SamplingMode) -> jax.Array:
    """Adjusted logits float32 [R, V] -> token ids int32 [R], or what `runner` has in place of one."""
    tokens, largest = jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.max(logits, axis=-1)
    if mode is not SamplingMode.GREEDY:
        drawn = _draw(logits, params, seq_lens, has_limits=mode is not SamplingMode.DRAW)
        tokens = jnp.where(params.temperature > 0, drawn, tokens)
        largest = largest / _divisor(params)  # what was drawn from must be a number as well
    missing = jnp.where(jnp.isneginf(largest), NO_CANDIDATES, BROKEN_LOGITS)
    return jnp.where(jnp.isfinite(largest), tokens, missing)


def _draw(logits: jax.Array, params: RowParams, seq_lens: jax.Array, has_limits: bool) -> jax.Array:
    scaled = logits / _divisor(params)[:, None]
    kept = jnp.where(_kept_tokens(jax.nn.softmax(scaled, axis=-1), params), scaled, -jnp.inf) if has_limits else scaled
    return jnp.argmax(kept + _gumbel(params, seq_lens, logits.shape[1]), axis=-1).astype(jnp.int32)


def _divisor(params: RowParams) -> jax.Array:
    """float32 [R]: the temperature, of greedy rows 1."""
    return jnp.where(params.temperature > 0, params.temperature, 1.0)


def _kept_tokens(probs: jax.Array, params: RowParams) -> jax.Array:
    """bool [R, V]: the tokens that survive top_k, then top_p of what is left, then min_p."""
    top_k, top_p = jnp.minimum(params.top_k, UNLIMITED_TOP_K), params.top_p
    k_threshold = _largest_threshold(probs, jnp.ones_like(probs, jnp.int32), top_k)
    kept = jnp.where(probs >= jnp.where(top_k < probs.shape[1], k_threshold, 0.0)[:, None], probs, 0.0)
    p_threshold = _largest_threshold(kept, kept, top_p * jnp.sum(kept, axis=-1))
    p_threshold = jnp.where(top_p < 1, p_threshold, 0.0)
    min_p_threshold = params.min_p * jnp.max(probs, axis=-1)
    return (kept > 0) & (kept >= jnp.maximum(p_threshold, min_p_threshold)[:, None])


def _largest_threshold(probs: jax.Array, amounts: jax.Array, wanted: jax.Array) -> jax.Array:
    """float32 [R]: per row the largest t >= 0 such that the amounts [R, V] of all probabilities >= t add up to `wanted` [R]."""
    num_rows, digits = probs.shape[0], range(1, 1 << _DIGIT_BITS)

    def totals(thresholds: list[jax.Array]) -> list[jax.Array]:
        """One reduction, so that probabilities are read once."""
        parts = [jnp.where(probs >= threshold[:, None], amounts, 0) for threshold in thresholds]
        zeros = [jnp.zeros((), amounts.dtype)] * len(parts)
        return jax.lax.reduce(parts, zeros, lambda sums, more: [a + b for a, b in zip(sums, more, strict=True)], (1,))

    def add_digit(step: jax.Array, found: jax.Array) -> jax.Array:
        shift = _THRESHOLD_BITS - (step + 1) * _DIGIT_BITS
        sums = totals([jax.lax.bitcast_convert_type(found + (digit << shift), jnp.float32) for digit in digits])
        return found + (sum((total >= wanted).astype(jnp.int32) for total in sums) << shift)

    found = jax.lax.fori_loop(0, _THRESHOLD_BITS // _DIGIT_BITS, add_digit, jnp.zeros((num_rows,), jnp.int32))
    return jax.lax.bitcast_convert_type(found, jnp.float32)


def _gumbel(params: RowParams, seq_lens: jax.Array, vocab_size: int) -> jax.Array:
    """float32 [R, V] noise from counter-based keys: a function of the row's seed and the position it samples for."""

    def noise(seed_low: jax.Array, seed_high: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(jnp.stack([seed_high, seed_low]).astype(jnp.uint32), impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32)

    return jax.vmap(noise)(params.seed_low, params.seed_high, seq_lens)


def after_temperature(logits: jax.Array, params: RowParams) -> jax.Array:
    """Adjusted logits [R, V] as `sample` draws from them, all tokens kept."""
    return logits / _divisor(params)[:, None]


def logprobs_of(logits: jax.Array, tokens: jax.Array, num_top: int) -> SampledTokens:
    """Logprobs of the distribution of `logits` float32 [R, V]."""
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=-1) - normalizer
    values, ids = jax.lax.top_k(logits, num_top)
    return SampledTokens(tokens, None, chosen[:, 0], ids.astype(jnp.int32), values - normalizer)


def allow_only(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """float32 [R, V] with the tokens ruled out whose bit in `masks` int32 [R, ceil(V / 32)] is 0; a NaN stays one."""
    bits = (masks[:, :, None] >> jnp.arange(32)) & 1
    is_allowed = bits.reshape(len(masks), -1)[:, : logits.shape[1]] > 0
    return jnp.where(is_allowed | jnp.isnan(logits), logits, -jnp.inf)
