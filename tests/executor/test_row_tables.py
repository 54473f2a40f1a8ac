"""Penalties, held-back stop tokens and biases against the formulas, on tables written row by row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.executor.row_params import row_params_from_state, split_row_params
from jaxserve.executor.row_tables import HISTORY_CHUNK, RowTables, adjust_logits, needs_tables, pack_row, write_row
from jaxserve.runner import RowState
from jaxserve.types import SamplingParams

V, ROWS = 50, 4


def state_of(
    row: int, *, stop: tuple[int, ...] = (), output: list[int] | None = None, prompt_len: int = 10, **sampling
) -> RowState:
    return RowState(
        row,
        SamplingParams(**sampling),
        seed=0,
        prompt_len=prompt_len,
        stop_token_ids=np.asarray(stop, np.int32),
        output_ids=np.asarray(output or [], np.int32),
        token_ids=np.zeros(0, np.int32),
    )


def empty_tables() -> RowTables:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), RowTables.shapes(ROWS, V))


def write(tables: RowTables, state: RowState) -> RowTables:
    for packed in pack_row(state, V):
        tables = jax.jit(write_row)(tables, jnp.asarray(packed))
    return tables


def adjusted(tables: RowTables, states: list[RowState], seq_lens: list[int], logits: np.ndarray) -> np.ndarray:
    params = split_row_params(jnp.asarray(np.stack([row_params_from_state(s) for s in states])))
    rows = jnp.asarray([s.row for s in states])
    return np.asarray(adjust_logits(jnp.asarray(logits), tables, rows, jnp.asarray(seq_lens), params))


def test_penalties_follow_their_formulas_and_count_only_generated_tokens() -> None:
    state = state_of(2, output=[4, 4, 7], frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0)
    logits = np.linspace(-2, 2, V, dtype=np.float32)[None]
    out = adjusted(write(empty_tables(), state), [state], [13], logits)[0]
    expected = logits[0].copy()
    for token, count in ((4, 2), (7, 1)):
        x = expected[token] - 0.5 * count - 0.25
        expected[token] = x / 2 if x > 0 else x * 2
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_min_new_tokens_holds_stop_tokens_back_until_it_is_reached() -> None:
    state = state_of(1, stop=(3, 9), min_new_tokens=2)
    tables = write(empty_tables(), state)
    logits = np.zeros((1, V), np.float32)
    for seq_len, held in ((10, True), (11, True), (12, False)):
        out = adjusted(tables, [state], [seq_len], logits)[0]
        assert (np.isneginf(out[[3, 9]]).all()) == held
        assert np.isfinite(np.delete(out, [3, 9])).all()


def test_logit_bias_adds_and_stale_entries_of_a_row_do_not_matter() -> None:
    biased = state_of(0, logit_bias={5: 3.0, 6: -100.0})
    tables = write(empty_tables(), biased)
    plain = state_of(0, frequency_penalty=0.1)  # a later request in the same row
    logits = np.ones((1, V), np.float32)
    out = adjusted(tables, [biased], [11], logits)[0]
    assert (out[5], out[6], out[7]) == (4.0, -99.0, 1.0)
    np.testing.assert_array_equal(adjusted(tables, [plain], [11], logits)[0], logits[0])


def test_a_long_history_takes_several_writes_and_the_first_one_clears_the_row() -> None:
    old = state_of(3, output=[1] * 5, frequency_penalty=1.0)
    history = [i % V for i in range(2 * HISTORY_CHUNK + 17)]
    new = state_of(3, output=history, frequency_penalty=1.0)
    tables = write(write(empty_tables(), old), new)
    np.testing.assert_array_equal(tables.output_counts[3], np.bincount(history, minlength=V))
    assert not np.any(tables.output_counts[:3])


def test_only_rows_with_such_features_need_the_tables() -> None:
    assert not needs_tables(state_of(0, temperature=0.5, top_p=0.5))
    assert needs_tables(state_of(0, presence_penalty=0.1))
    assert needs_tables(state_of(0, min_new_tokens=1))
    assert needs_tables(state_of(0, logit_bias={1: 1.0}))
