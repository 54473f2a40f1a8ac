"""The sampling half of the step: a pure function of (sampling state, what the forward half hands on).

A row brings the logits of one token, or of K where drafts are verified: the token sampled last and up to K - 1 guesses of what
follows. Each of the K is sampled as if its draft were right, with the noise of its own position; a draft is accepted where
it equals what was sampled before it. So a row gains the tokens that it would have gained one by one, whatever was guessed: the
same ones where it is seeded, and ones of the model's distribution where it is not.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.executor.ngram import NgramDrafter
from jaxserve.executor.row_params import split_row_params
from jaxserve.executor.row_tables import RowTables, adjust_logits
from jaxserve.executor.sampler import SampledTokens, SamplingMode, after_temperature, allow_only, logprobs_of, sample
from jaxserve.runner import RunnerSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Continuation:
    """What the next decode step of each request row goes on from; a line per row and one for padding rows."""

    tokens: jax.Array  # int32 [max_rows + 1, K]: the token sampled last, then drafts; -1 from where there are none
    lengths: jax.Array | None  # int32 [max_rows + 1] tokens in the row's KV cache; None where nothing drafts: the host knows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """What the sampling half keeps on the device."""

    continuation: Continuation
    tables: RowTables
    history: jax.Array | None  # int32 [max_rows + 1, context_len]: each row's sequence, where drafts are looked up


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forwarded:
    """What the forward half hands on: of R rows, K tokens each."""

    logits: jax.Array  # float32 [R * K, V]; K = 1: of each row's last token, else of its inputs in order
    inputs: jax.Array  # int32 [R, K] the token sampled last and the drafts behind it (decode rows)
    rows: jax.Array  # int32 [R] request rows
    seq_lens: jax.Array  # int32 [R] with all of the step's tokens
    extend_lens: jax.Array  # int32 [R] the step's tokens
    sample: jax.Array  # int32 [R] 1 where the next token is wanted
    row_params: jax.Array  # int32 [R, NUM_ROW_PARAMS]


class Sampled(NamedTuple):
    """What a sampling program gives beside its state."""

    tokens: SampledTokens
    continuation: Continuation | None  # for the first stage of a pipeline: a copy of the state's, which the next step changes


def sample_rows(
    state: SamplingState,
    forwarded: Forwarded,
    masks: jax.Array | None,
    mode: SamplingMode,
    spec: RunnerSpec,
    drafter: NgramDrafter | None,
) -> tuple[SamplingState, SampledTokens]:
    """`masks` int32 [R * K, ceil(V / 32)] of allowed tokens, in the modes that take them."""
    rows, (num_rows, K) = forwarded.rows, forwarded.inputs.shape
    is_wanted = forwarded.sample > 0
    first_len = forwarded.seq_lens  # of the sequence before each row's first new token
    if K > 1:
        first_len = first_len - (forwarded.extend_lens - 1)
    with jax.named_scope("sample"):
        sampled = _sample_lines(state.tables, forwarded, first_len, masks, mode, spec)
        num_tokens = is_wanted.astype(jnp.int32)
        if K > 1:
            num_tokens *= 1 + _num_accepted(sampled.token_ids, forwarded.inputs, forwarded.extend_lens)
        is_gained = jnp.arange(K) < num_tokens[:, None]
        tables = state.tables
        if mode is SamplingMode.EVERYTHING:
            gained = jnp.maximum(sampled.token_ids, 0)
            counts = tables.output_counts.at[rows[:, None], gained].add(is_gained.astype(jnp.int16))
            tables = dataclasses.replace(tables, output_counts=counts)
    wanted_rows = jnp.where(is_wanted, rows, state.continuation.tokens.shape[0])
    last = sampled.token_ids[:, 0]
    if K > 1:
        last = sampled.token_ids[jnp.arange(num_rows), jnp.maximum(num_tokens - 1, 0)]
    following = jnp.maximum(last, 0)[:, None]
    lengths, history = state.continuation.lengths, state.history
    if drafter is not None and lengths is not None and history is not None:
        new_lens = first_len + num_tokens - 1 if K > 1 else forwarded.seq_lens
        lengths = lengths.at[rows].set(new_lens)
        places = jnp.where(is_gained, first_len[:, None] + jnp.arange(K), history.shape[1])
        history = history.at[rows[:, None], places].set(jnp.maximum(sampled.token_ids, 0), mode="drop")
        with jax.named_scope("draft"):
            drafts = drafter.propose(history[rows], new_lens + 1)
        following = jnp.concatenate([following, drafts], axis=1)
        sampled = dataclasses.replace(sampled, num_tokens=num_tokens, drafts=drafts)
    tokens = state.continuation.tokens.at[wanted_rows].set(following, mode="drop")
    return SamplingState(Continuation(tokens, lengths), tables, history), sampled


def _sample_lines(
    tables: RowTables,
    forwarded: Forwarded,
    first_len: jax.Array,
    masks: jax.Array | None,
    mode: SamplingMode,
    spec: RunnerSpec,
) -> SampledTokens:
    """Tokens [R, K] and, in SamplingMode.EVERYTHING, their logprobs."""
    logits, (num_rows, K) = forwarded.logits, forwarded.inputs.shape
    rows, seq_lens, row_params = forwarded.rows, first_len, forwarded.row_params
    drafts_before = None
    if K > 1:
        rows, row_params = jnp.repeat(rows, K), jnp.repeat(row_params, K, axis=0)
        seq_lens = (first_len[:, None] + jnp.arange(K, dtype=jnp.int32)).reshape(-1)
        drafts_before = _drafts_before(forwarded.inputs)
    params, adjusted = split_row_params(row_params), logits
    if mode is SamplingMode.EVERYTHING:
        adjusted = adjust_logits(logits, tables, rows, seq_lens, params, drafts_before)
    if mode.takes_masks:
        assert masks is not None, f"{mode} without masks"
        adjusted = allow_only(adjusted, masks)
    tokens = sample(adjusted, params, seq_lens, mode)
    if mode is not SamplingMode.EVERYTHING:
        return SampledTokens(tokens.reshape(num_rows, K))
    shown = after_temperature(adjusted, params) if spec.logprobs_after_temperature else logits
    return logprobs_of(shown, tokens, spec.max_top_logprobs).by_rows(num_rows, K)


def _drafts_before(inputs: jax.Array) -> jax.Array:
    """int32 [R * K, K - 1]: the drafts that stand before each line's token, -1 elsewhere. They count as output there."""
    num_rows, K = inputs.shape
    place = jnp.arange(K)
    before = jnp.where(place[None, :, None] > place[None, None, :-1], inputs[:, None, 1:], -1)
    return before.reshape(num_rows * K, K - 1)


def _num_accepted(tokens: jax.Array, inputs: jax.Array, extend_lens: jax.Array) -> jax.Array:
    """int32 [R]: how many drafts agree with what was sampled before them, up to the first that does not."""
    place = jnp.arange(1, inputs.shape[1])
    agrees = (tokens[:, :-1] == inputs[:, 1:]) & (place < extend_lens[:, None])
    return jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1)
