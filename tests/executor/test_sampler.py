"""The sampler against a plain NumPy sort-based one, row for row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.executor import sampler
from jaxserve.executor.row_params import NUM_ROW_PARAMS, RowParams, has_limits, row_params_from_state, split_row_params
from jaxserve.executor.sampler import SamplingMode
from jaxserve.runner import BROKEN_LOGITS, NO_CANDIDATES, RowState
from jaxserve.types import SamplingParams

V = 97

# Jitted: run eagerly, every call would trace the loops again.
kept_tokens = jax.jit(sampler._kept_tokens)
sample = jax.jit(sampler.sample, static_argnames="mode")
logprobs_of = jax.jit(sampler.logprobs_of, static_argnames="num_top")


def row_state(row: int = 0, seed: int = 1, prompt_len: int = 3, **sampling: object) -> RowState:
    nothing = np.zeros(0, np.int32)
    return RowState(row, SamplingParams(**sampling), seed, prompt_len, nothing, nothing, nothing)  # type: ignore[arg-type]


def params_of(*states: RowState) -> RowParams:
    return split_row_params(jnp.asarray(np.stack([row_params_from_state(state) for state in states])))


def random_logits(rows: int, seed: int = 0, scale: float = 3.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, V)) * scale, jnp.float32)


def kept_by_sorting(probs: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """top_k, then top_p over what is left renormalized, then min_p of the largest probability."""
    order = np.argsort(-probs, kind="stable")
    keep = np.zeros(len(probs), bool)
    keep[order[: len(probs) if top_k == -1 else top_k]] = True
    left = np.where(keep, probs, 0.0).astype(np.float64)
    if top_p < 1.0:  # else all are kept, also where the sum no longer feels them
        before = np.cumsum(left[order]) - left[order]
        keep[order] &= before < top_p * left.sum()
    return keep & (probs >= min_p * probs.max())


@settings(max_examples=60, deadline=None)
@example(seed=400, top_k=-1, top_p=1.0, min_p=0.0, scale=5.0)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.one_of(st.just(-1), st.integers(1, V + 5)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
)
def test_kept_tokens_match_a_sort(seed: int, top_k: int, top_p: float, min_p: float, scale: float) -> None:
    probs = jax.nn.softmax(random_logits(1, seed, scale), axis=-1)
    kept = np.asarray(kept_tokens(probs, params_of(row_state(top_k=top_k, top_p=top_p, min_p=min_p))))[0]
    expected = kept_by_sorting(np.asarray(probs)[0], top_k, top_p, min_p)
    differing = np.flatnonzero(kept != expected)
    # float32 sums in another order may move the top_p border by the one token that stands on it.
    assert len(differing) <= 1, (differing, top_k, top_p, min_p)


def test_greedy_rows_take_the_argmax_even_beside_sampled_ones() -> None:
    logits = random_logits(3)
    params = params_of(row_state(temperature=0), row_state(temperature=2.0), row_state(top_k=1))
    tokens = sample(logits, params, jnp.full(3, 7), SamplingMode.LIMITED)
    best = np.asarray(jnp.argmax(logits, axis=-1))
    assert tokens[0] == best[0]
    assert tokens[2] == best[2]


def test_a_seeded_row_samples_the_same_alone_and_in_any_batch() -> None:
    logits = random_logits(8)
    states = [row_state(seed=100 + i, temperature=1.5, top_p=0.9) for i in range(8)]
    lens = jnp.arange(8, dtype=jnp.int32) + 5
    together = np.asarray(sample(logits, params_of(*states), lens, SamplingMode.LIMITED))
    for i in range(8):
        alone = sample(logits[i : i + 1], params_of(states[i]), lens[i : i + 1], SamplingMode.LIMITED)
        assert int(alone[0]) == together[i]


@pytest.mark.parametrize(("seed", "other"), [(1, 2), (1, 1 + 2**40), (-1, 1)])
def test_different_seeds_and_positions_give_different_noise(seed: int, other: int) -> None:
    logits = jnp.zeros((1, V))

    def draws(s: int) -> list[int]:
        params = params_of(row_state(seed=s))
        return [int(sample(logits, params, jnp.asarray([p]), SamplingMode.LIMITED)[0]) for p in range(12)]

    assert draws(seed) != draws(other)
    assert len(set(draws(seed))) > 6


def test_samples_follow_the_distribution() -> None:
    probs = np.array([0.5, 0.25, 0.125, 0.125])
    rows = 4000
    logits = jnp.tile(jnp.log(jnp.asarray(probs, jnp.float32)), (rows, 1))
    packed = np.tile(row_params_from_state(row_state()), (rows, 1))
    assert packed.shape == (rows, NUM_ROW_PARAMS)
    params = split_row_params(jnp.asarray(packed))
    tokens = np.asarray(sample(logits, params, jnp.arange(rows), SamplingMode.LIMITED))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / rows, probs, atol=0.03)


@pytest.mark.parametrize("mode", SamplingMode)
@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ({5: np.nan}, BROKEN_LOGITS),
        ({5: np.inf}, BROKEN_LOGITS),
        ({5: np.inf, 6: -np.inf, 7: np.nan}, BROKEN_LOGITS),
        (dict.fromkeys(range(V), np.nan), BROKEN_LOGITS),
        (dict.fromkeys(range(V), -np.inf), NO_CANDIDATES),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_number_on_top_is_marked_and_leaves_its_neighbours_alone(
    mode: SamplingMode, logits: dict[int, float], expected: int, temperature: float
) -> None:
    both = np.asarray(random_logits(2)).copy()
    both[0, list(logits)] = list(logits.values())
    params = params_of(row_state(temperature=temperature, top_p=0.9, top_k=7), row_state(temperature=0))
    tokens = sample(jnp.asarray(both), params, jnp.full(2, 4), mode)
    assert tokens.tolist() == [expected, int(both[1].argmax())]


def test_logits_that_the_temperature_carries_beyond_float32_are_marked() -> None:
    logits = random_logits(1).at[0, 3].set(1e38)
    assert sample(logits, params_of(row_state(temperature=1e-6)), jnp.full(1, 4), SamplingMode.LIMITED).tolist() == [-1]
    assert sample(logits, params_of(row_state(temperature=1e-6)), jnp.full(1, 4), SamplingMode.GREEDY).tolist() == [3]


TINY = (5e-324, 1e-46, 1e-40, 1.2e-38, 1e-30, 1e-20)


@pytest.mark.parametrize("limit", [{"top_p": value} for value in TINY] + [{"top_p": value, "top_k": 3} for value in TINY])
def test_a_tiny_top_p_keeps_the_likeliest_token(limit: dict[str, Any]) -> None:
    """Also where float32 has no such number, or only a subnormal one."""
    logits = random_logits(4)
    params = params_of(*(row_state(seed=seed, temperature=5.0, **limit) for seed in range(4)))
    tokens = sample(logits, params, jnp.full(4, 4), SamplingMode.LIMITED)
    assert tokens.tolist() == jnp.argmax(logits, axis=-1).tolist()


@pytest.mark.parametrize("params", [{"temperature": 1e-6}, {"temperature": 1e6}, {"min_p": 5e-324}, {"min_p": 1.0}])
def test_the_ends_of_the_ranges_give_tokens(params: dict[str, float]) -> None:
    """Among forbidden ones, never a forbidden one."""
    logits = jnp.full((8, V), -jnp.inf).at[:, 11:31].set(random_logits(8)[:, 11:31])
    states = [row_state(seed=seed, **params) for seed in range(8)]
    tokens = sample(logits, params_of(*states), jnp.full(8, 4), SamplingMode.LIMITED)
    assert all(11 <= token < 31 for token in tokens.tolist()), tokens


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = random_logits(3)
    tokens = jnp.asarray([1, 2, 3], jnp.int32)
    out = logprobs_of(logits, tokens, 5)
    expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    np.testing.assert_allclose(out.logprobs, expected[np.arange(3), np.asarray(tokens)], rtol=1e-5)
    order = np.argsort(-expected, axis=-1)[:, :5]
    np.testing.assert_array_equal(out.top_ids, order)
    np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(expected, order, axis=-1), rtol=1e-5)


def test_a_row_without_limits_draws_alike_in_every_mode() -> None:
    """Its batch may need more than it does."""
    logits, lens = random_logits(4), jnp.arange(4, dtype=jnp.int32)
    params = params_of(*(row_state(seed=i, temperature=0.8) for i in range(4)))
    modes = (SamplingMode.DRAW, SamplingMode.LIMITED, SamplingMode.MASKED, SamplingMode.EVERYTHING)
    assert len({tuple(np.asarray(sample(logits, params, lens, mode)).tolist()) for mode in modes}) == 1


def test_the_mode_follows_what_the_rows_ask_for() -> None:
    def mode(*states: RowState, draws: bool = True, everything: bool = False) -> SamplingMode:
        packed = np.stack([row_params_from_state(state) for state in states])
        return SamplingMode.of(draws=draws, limits=has_limits(packed), everything=everything)

    assert mode(row_state(temperature=0), draws=False) is SamplingMode.GREEDY
    assert mode(row_state(), row_state(temperature=0, top_k=3)) is SamplingMode.DRAW
    for limit in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}):
        assert mode(row_state(), row_state(**limit)) is SamplingMode.LIMITED
    assert mode(row_state(temperature=0), draws=False, everything=True) is SamplingMode.EVERYTHING
