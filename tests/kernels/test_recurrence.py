"""Recurrences and convolutions against their definition, token by token in float64, over rows, segments and snapshots."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import recurrence
from jaxserve.kernels.pallas.gpu.recurrence import recurrent_step, scan_chunks, takes_chunks, takes_step
from jaxserve.kernels.recurrence import causal_conv, recur, tokens_in_turn
from jaxserve.kernels.recurrence_arrays import Recurrence
from jaxserve.kernels.state_rows import NO_LINE, StateRows

NUM_LINES = 12
PADDING = -7.0  # in lines that no row reads


@dataclasses.dataclass(frozen=True)
class Row:
    """`source`: line that it goes on from, None: none. `cuts`: (tokens before, line) of snapshots; `target`: at its end."""

    num_tokens: int
    source: int | None
    target: int
    cuts: tuple[tuple[int, int], ...] = ()


ONE_LONG = (Row(150, None, 0),)
SEVERAL = (Row(1, 3, 3), Row(70, 1, 1, ((64, 5),)), Row(64, None, 2, ((64, 6),)), Row(5, 7, 4, ((2, 8), (4, 9))))
CASES = {
    "one long": (ONE_LONG, 160, 2),
    "several": (SEVERAL, 140, 4),
    "several and padding": (SEVERAL, 200, 7),
    "few tokens": ((Row(3, None, 0), Row(2, 4, 4, ((1, 5),))), 6, 3),
}


def state_rows(rows: tuple[Row, ...], num_tokens: int, num_rows: int) -> StateRows:
    padding = (Row(0, NUM_LINES - 1, NUM_LINES - 1),) * (num_rows - len(rows))
    lens = np.array([row.num_tokens for row in (*rows, *padding)])
    cu_q_lens = np.concatenate([[0], np.cumsum(lens)])
    most = max(len(row.cuts) for row in rows)
    cuts, targets = np.zeros((num_rows, most), np.int32), np.zeros((num_rows, most + 1), np.int32)
    for index, row in enumerate((*rows, *padding)):
        for place, (tokens, line) in enumerate((*row.cuts, *row.cuts[-1:] * (most - len(row.cuts)))):
            cuts[index, place], targets[index, place] = tokens, line
        targets[index, most] = row.target
    row_index = np.minimum(np.searchsorted(cu_q_lens[1:], np.arange(num_tokens), side="right"), num_rows - 1)
    return StateRows.in_chunks(
        sources=jnp.array([row.source or 0 for row in (*rows, *padding)], jnp.int32),
        is_new=jnp.array([row.source is None for row in (*rows, *padding)]),
        cu_q_lens=jnp.array(cu_q_lens, jnp.int32),
        row_index=jnp.array(row_index, jnp.int32),
        cuts=jnp.array(cuts),
        targets=jnp.array(targets),
    )


def in_turn(rows: tuple[Row, ...], num_rows: int, most: int) -> tuple[StateRows, list[int]]:
    """Rows of at most `most` tokens, each of which leaves a state; and the slots of the tokens there are."""
    targets = np.full((num_rows, most), NO_LINE, np.int32)
    for index, row in enumerate(rows):
        targets[index, : row.num_tokens] = [*(line for _, line in row.cuts), row.target]
    padding = [None] * (num_rows - len(rows))
    sources = [*(row.source for row in rows), *padding]
    planned = StateRows.in_turn(
        sources=jnp.array([source or 0 for source in sources], jnp.int32),
        is_new=jnp.array([source is None for source in sources]),
        targets=jnp.array(targets),
    )
    return planned, [index * most + token for index, row in enumerate(rows) for token in range(row.num_tokens)]


def inputs_of(num_tokens: int, has_rate: bool, *, key_dim: int = 16, value_dim: int = 24, alike: bool = False) -> Recurrence:
    """2 groups of 3 heads. `alike`: keys that nearly repeat, for which a chunk's equations are at their worst."""
    rng = np.random.default_rng(0)
    draw: Any = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    k = draw(1, 2, key_dim) + 0.01 * draw(num_tokens, 2, key_dim) if alike else draw(num_tokens, 2, key_dim)
    k = np.broadcast_to(k, (num_tokens, 2, key_dim)) / np.linalg.norm(k, axis=-1, keepdims=True)
    decay = -np.exp(rng.uniform(-9, 1, (num_tokens, 2, 3))).astype(np.float32)
    rate = rng.uniform(0.1, 1, (num_tokens, 2, 3)).astype(np.float32) if has_rate else None
    values = (draw(num_tokens, 2, key_dim), k, draw(num_tokens, 2, 3, value_dim), decay, rate)
    return Recurrence(*(None if value is None else jnp.array(value) for value in values))  # type: ignore[arg-type]


def expected(inputs: Recurrence, states: np.ndarray, rows: tuple[Row, ...]) -> tuple[np.ndarray, np.ndarray]:
    """States [lines, heads, K, V]."""
    q, k, v, decay, rate = (None if x is None else np.asarray(x, np.float64) for x in inputs)
    assert q is not None and k is not None and v is not None and decay is not None
    out, lines = np.zeros(v.shape), states.astype(np.float64)
    token = 0
    for row in rows:
        state = np.zeros(lines.shape[1:]) if row.source is None else states[row.source].astype(np.float64)
        for done in range(1, row.num_tokens + 1):
            for head in range(len(state)):
                at = divmod(head, 3)
                state[head] *= np.exp(decay[token][at])
                added = v[token][at]
                if rate is not None:
                    added = rate[token][at] * (added - k[token, at[0]] @ state[head])
                state[head] += np.outer(k[token, at[0]], added)
                out[token][at] = q[token, at[0]] @ state[head]
            token += 1
            for line in (line for tokens, line in row.cuts if tokens == done):
                lines[line] = state
        if row.num_tokens not in dict(row.cuts):
            lines[row.target] = state
    return out, lines


def states_of(key_dim: int = 16, value_dim: int = 24) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((NUM_LINES, 6, key_dim, value_dim)).astype(np.float32)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("has_rate", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_chunks_are_the_recurrence(case: str, has_rate: bool, alike: bool) -> None:
    rows, num_tokens, num_rows = CASES[case]
    inputs, states = inputs_of(num_tokens, has_rate, alike=alike), states_of()
    out, lines = jax.jit(recur)(inputs, jnp.array(states), state_rows(rows, num_tokens, num_rows))
    live = sum(row.num_tokens for row in rows)
    wanted, wanted_lines = expected(inputs, states, rows)
    np.testing.assert_allclose(np.asarray(out)[:live], wanted[:live], atol=3e-5, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(lines)[:-1], wanted_lines[:-1], atol=3e-5, rtol=1e-5)
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize("has_rate", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_goes_through_chunks(case: str, has_rate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, num_tokens, num_rows = CASES[case]
    inputs, states = inputs_of(num_tokens, has_rate, value_dim=64), states_of(value_dim=64)
    planned = state_rows(rows, num_tokens, num_rows)
    assert planned.chunks is not None
    if not takes_chunks(inputs, planned.chunks.size):
        pytest.skip("too few tokens for it")
    kernel = functools.partial(scan_chunks, is_exact=True, interpret=True)
    monkeypatch.setattr(recurrence, "chunks_in_turn", kernel)
    monkeypatch.setattr(recurrence, "_BATCH", 3)  # so that rows go on in the next call
    out, lines = recur(inputs, jnp.array(states), planned)
    live = sum(row.num_tokens for row in rows)
    wanted, wanted_lines = expected(inputs, states, rows)
    np.testing.assert_allclose(np.asarray(out)[:live], wanted[:live], atol=3e-5, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(lines)[:-1], wanted_lines[:-1], atol=3e-5, rtol=1e-5)


# Rows, and how many tokens they have at most.
STEPS = {
    "one each": ((Row(1, 3, 3), Row(1, None, 0), Row(1, 5, 1), Row(1, 2, 6)), 1),
    "a few": ((Row(3, 3, 3, ((1, 5), (2, 6))), Row(1, None, 0), Row(2, 8, 1, ((1, 2),))), 3),
}


@pytest.mark.parametrize("has_rate", [False, True])
@pytest.mark.parametrize("way", ["chosen", "xla", "triton"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_few_tokens_each(step: str, way: str, has_rate: bool) -> None:
    of_step, most = STEPS[step]
    inputs, states = inputs_of(6 * most, has_rate, value_dim=32), states_of(value_dim=32)
    rows, slots = in_turn(of_step, 6, most)
    grouped = jnp.array(states.reshape(NUM_LINES, 2, 3, *states.shape[2:]))
    if way == "chosen":
        out, lines = jax.jit(recur)(inputs, jnp.array(states), rows)
    elif way == "xla":
        out, lines = tokens_in_turn(inputs, grouped, rows)
    else:
        assert takes_step(inputs)
        out, lines = recurrent_step(inputs, grouped, rows, interpret=True)
    wanted, wanted_lines = expected(jax.tree.map(lambda x: x[np.array(slots)], inputs), states, of_step)
    np.testing.assert_allclose(np.asarray(out)[np.array(slots)], wanted, atol=1e-5)
    np.testing.assert_allclose(np.asarray(lines).reshape(states.shape), wanted_lines, atol=1e-5)


def test_padding_has_no_line() -> None:
    rows, _ = in_turn(STEPS["one each"][0], 6, 1)
    assert np.asarray(rows.at(1000).targets)[4:].min() >= NO_LINE


@pytest.mark.parametrize("case", [*CASES, *STEPS])
def test_convolutions_see_what_came_before(case: str) -> None:
    if case in STEPS:
        rows, most = STEPS[case]
        num_tokens = 6 * most
        planned, slots = in_turn(rows, 6, most)
    else:
        rows, num_tokens, num_rows = CASES[case]
        planned, slots = state_rows(rows, num_tokens, num_rows), list(range(num_tokens))
    rng, size, channels = np.random.default_rng(2), 4, 5
    x, taps = rng.standard_normal((num_tokens, channels)), rng.standard_normal((size, channels))
    held, bias = rng.standard_normal((NUM_LINES, size - 1, channels)), rng.standard_normal(channels)
    arrays = (jnp.array(array, jnp.float32) for array in (x, taps, bias, held))
    out, lines = causal_conv(*arrays, planned)
    wanted, token = held.copy(), 0
    for row in rows:
        before = np.zeros((size - 1, channels)) if row.source is None else held[row.source]
        seen = np.concatenate([before, x[slots[token : token + row.num_tokens]]])
        for place in range(row.num_tokens):
            np.testing.assert_allclose(out[slots[token + place]], (seen[place : place + size] * taps).sum(0) + bias, atol=1e-5)
        ends = dict(row.cuts)
        ends.setdefault(row.num_tokens, row.target)
        for tokens, line in ends.items():
            wanted[line] = seen[tokens : tokens + size - 1]
        token += row.num_tokens
    np.testing.assert_allclose(np.asarray(lines)[:-1], wanted[:-1], atol=1e-6)
