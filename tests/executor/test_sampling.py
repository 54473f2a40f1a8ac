"""The sampling half alone: drafts change how many tokens a step gains, never their distribution; masks; the state behind it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_runner import fake_spec

from jaxserve.executor.ngram import NgramDrafter
from jaxserve.executor.row_params import row_params_from_state
from jaxserve.executor.row_tables import RowTables
from jaxserve.executor.sampler import SampledTokens, SamplingMode
from jaxserve.executor.sampling import Continuation, Forwarded, SamplingState, sample_rows
from jaxserve.runner import BROKEN_LOGITS, NO_CANDIDATES, RowState
from jaxserve.types import SamplingParams

V, CONTEXT_LEN = 8, 32


def state_of(num_rows: int, K: int) -> SamplingState:
    tables = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), RowTables.shapes(num_rows + 1, V))
    return SamplingState(
        Continuation(jnp.full((num_rows + 1, K), -1), jnp.zeros(num_rows + 1, jnp.int32)),
        tables,
        jnp.zeros((num_rows + 1, CONTEXT_LEN), jnp.int32),
    )


def forwarded_of(logits: np.ndarray, inputs: np.ndarray, start: int, **sampling: object) -> Forwarded:
    """`logits` [R, K, V] after `inputs` [R, K] of rows that held `start` tokens."""
    num_rows, K = inputs.shape
    nothing = np.zeros(0, np.int32)
    rows = [
        RowState(row, SamplingParams(**sampling), row, 1, nothing, nothing, nothing)  # type: ignore[arg-type]
        for row in range(num_rows)
    ]
    extend_lens = 1 + (inputs[:, 1:] >= 0).sum(axis=1)
    return Forwarded(
        logits=jnp.asarray(logits.reshape(num_rows * K, V), jnp.float32),
        inputs=jnp.asarray(inputs, jnp.int32),
        rows=jnp.arange(num_rows),
        seq_lens=jnp.asarray(start + extend_lens, jnp.int32),
        extend_lens=jnp.asarray(extend_lens, jnp.int32),
        sample=jnp.ones(num_rows, jnp.int32),
        row_params=jnp.asarray(np.stack([row_params_from_state(row) for row in rows])),
    )


def sample(
    forwarded: Forwarded, mode: SamplingMode, masks: np.ndarray | None = None, **spec: object
) -> tuple[SamplingState, SampledTokens]:
    num_rows, K = forwarded.inputs.shape
    drafter = NgramDrafter(num_drafts=K - 1, min_match=1, max_match=3)
    run = jax.jit(functools.partial(sample_rows, mode=mode, spec=fake_spec(max_top_logprobs=2, **spec), drafter=drafter))
    words = np.full((num_rows * K, 1), -1, np.int32) if masks is None else masks
    return run(state_of(num_rows, K), forwarded, jnp.asarray(words) if mode.takes_masks else None)


@pytest.mark.parametrize("mode", [SamplingMode.DRAW, SamplingMode.LIMITED, SamplingMode.MASKED, SamplingMode.EVERYTHING])
def test_drafts_leave_the_distribution_as_it_is(mode: SamplingMode) -> None:
    """Chi-square of the first token and of the second, where there is one, for drafts that are often right and never right."""
    R, K = 6000, 3
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(K, V)).astype(np.float32)
    inputs = rng.integers(0, V, size=(R, K))
    inputs[: R // 2, 1] = logits[0].argmax()
    sampling = {"temperature": 0.9}
    forwarded = forwarded_of(np.broadcast_to(logits, (R, K, V)), inputs, start=5, **sampling)
    sampled = sample(forwarded, mode)[1]
    tokens, num_tokens = np.asarray(sampled.token_ids), np.asarray(sampled.num_tokens)
    accepted_first = tokens[:, 0] == inputs[:, 1]
    assert ((num_tokens >= 2) == accepted_first).all()
    for place in range(2):
        gained = tokens[num_tokens > place, place]
        scaled = np.exp(logits[place] / 0.9)
        expected = scaled / scaled.sum() * len(gained)
        chi_square = float(((np.bincount(gained, minlength=V) - expected) ** 2 / expected).sum())
        assert chi_square < 24.3, (place, chi_square)  # 7 degrees of freedom: one in a thousand


def test_drafts_are_accepted_up_to_the_first_wrong_one_and_the_state_goes_on_behind_them() -> None:
    tokens = np.array([[3, 4, 5, 6]] * 4)  # what greedy sampling gives at the four places
    logits = np.eye(V)[tokens] * 10
    inputs = np.array([[1, 3, 4, 5], [1, 3, 7, 5], [1, -1, -1, -1], [1, 3, 4, -1]])
    state, sampled = sample(forwarded_of(logits, inputs, start=5, temperature=0), SamplingMode.GREEDY)
    assert np.asarray(sampled.num_tokens).tolist() == [4, 2, 1, 3]
    assert state.continuation.lengths is not None and state.history is not None
    assert np.asarray(state.continuation.lengths[:4]).tolist() == [9, 7, 6, 8]
    assert np.asarray(state.continuation.tokens[:4, 0]).tolist() == [6, 4, 3, 5]
    assert np.asarray(state.history[:4, 6:10]).tolist() == [[3, 4, 5, 6], [3, 4, 0, 0], [3, 0, 0, 0], [3, 4, 5, 0]]


def test_accepted_drafts_count_as_output_for_penalties() -> None:
    """The second place sees the first place's token as generated: its penalty makes another one win."""
    logits = np.zeros((1, 3, V))
    logits[0, :, 3], logits[0, :, 4] = 1.0, 0.9
    inputs = np.array([[1, 3, 4]])
    state, sampled = sample(forwarded_of(logits, inputs, 5, temperature=0, presence_penalty=0.5), SamplingMode.EVERYTHING)
    assert np.asarray(sampled.token_ids)[0].tolist() == [3, 4, 3]
    assert np.asarray(state.tables.output_counts)[0].tolist() == [0, 0, 0, 2, 1, 0, 0, 0]


def test_masks_hold_for_each_place_and_a_nan_is_still_seen() -> None:
    logits = np.zeros((2, 2, V))
    logits[1, 0, 0] = np.nan
    inputs = np.array([[1, 6], [1, 6]])
    masks = np.array([[1 << 6], [1 << 2], [1 << 5], [-1]], np.int32)
    sampled = sample(forwarded_of(logits, inputs, 5, temperature=0), SamplingMode.MASKED, masks)[1]
    assert np.asarray(sampled.token_ids)[0].tolist() == [6, 2]
    assert np.asarray(sampled.token_ids)[1, 0] == -1
    assert np.asarray(sampled.num_tokens).tolist() == [2, 1]


@pytest.mark.parametrize("mode", [SamplingMode.MASKED, SamplingMode.EVERYTHING])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_leaves_nothing_ends_a_row_at_its_place(mode: SamplingMode, temperature: float) -> None:
    """The first place accepts its draft; behind it nothing is allowed."""
    inputs = np.array([[1, 6, 3], [1, 6, 3]])
    masks = np.array([[1 << 6], [0], [-1], [0], [-1], [-1]], np.int32)
    sampled = sample(forwarded_of(np.zeros((2, 3, V)), inputs, 5, temperature=temperature), mode, masks)[1]
    assert np.asarray(sampled.num_tokens).tolist() == [2, 1]
    assert np.asarray(sampled.token_ids)[0, :2].tolist() == [6, NO_CANDIDATES]
    assert np.asarray(sampled.token_ids)[1, 0] == NO_CANDIDATES


def test_a_broken_place_ends_a_row_there() -> None:
    tokens = np.array([[3, 4, 5]])
    logits = np.eye(V)[tokens] * 10
    logits[0, 1, 2] = np.inf
    sampled = sample(forwarded_of(logits, np.array([[1, 3, 4]]), 5, temperature=0), SamplingMode.GREEDY)[1]
    assert np.asarray(sampled.num_tokens).tolist() == [2]
    assert np.asarray(sampled.token_ids)[0, :2].tolist() == [3, BROKEN_LOGITS]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_logprobs_after_temperature_are_of_what_is_drawn_from(temperature: float) -> None:
    """Of adjusted logits, here by a mask; greedy rows have no temperature."""
    logits = np.random.default_rng(4).normal(size=(1, 1, V)).astype(np.float32)
    forwarded = forwarded_of(logits, np.array([[3]]), start=5, temperature=temperature)
    allowed = np.array([[0b01011011]], np.int32)
    sampled = sample(forwarded, SamplingMode.EVERYTHING, allowed, logprobs_after_temperature=True)[1]
    adjusted = np.where([bool(allowed[0, 0] >> token & 1) for token in range(V)], logits[0, 0], -np.inf) / (temperature or 1.0)
    expected = adjusted - np.log(np.exp(adjusted).sum())
    token = int(sampled.token_ids[0, 0])
    assert sampled.logprobs is not None and sampled.top_logprobs is not None
    np.testing.assert_allclose(sampled.logprobs[0, 0], expected[token], rtol=1e-5)
    np.testing.assert_allclose(sampled.top_logprobs[0, 0], np.sort(expected)[::-1][:2], rtol=1e-5)
