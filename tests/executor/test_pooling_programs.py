"""The programs that make vectors of hidden states, by hand: every kind, in parts, over shards, with states of no numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxserve.executor.pooling import PooledLines, num_pooled, pack_pooling, pool_lines, unpack_pooled
from jaxserve.models import DATA_AXIS, TENSOR_AXIS
from jaxserve.models.specs import POOLINGS
from jaxserve.runner import PoolQuery

SLOTS, SIZE, NUM_LINES, NUM_ROWS = 16, 6, 4, 8  # of each shard
WHOLE_KINDS = tuple(kind for kind in POOLINGS if kind != "tokens")


def by_hand(kind: str, states: np.ndarray) -> np.ndarray:
    """[n, E] of a text -> [E], as sentence-transformers defines it."""
    count = len(states)
    match kind:
        case "cls":
            return states[0]
        case "last":
            return states[-1]
        case "mean":
            return states.mean(axis=0)
        case "mean_sqrt_len":
            return states.sum(axis=0) / np.sqrt(count)
        case "max":
            return states.max(axis=0)
    weights = np.arange(1, count + 1)
    return (states * weights[:, None]).sum(axis=0) / weights.sum()


class Device:
    """What a stage does with a program."""

    def __init__(self, kinds: Sequence[str], *, shards: int = 1, keeps_sums: bool = True) -> None:
        decoder: Any = SimpleNamespace(
            config=SimpleNamespace(pooling=SimpleNamespace(kinds=tuple(kinds))), pool_head=lambda params, vectors: 2 * vectors
        )
        mesh = Mesh(np.array(jax.devices()[: 2 * shards]).reshape(shards, 2), (DATA_AXIS, TENSOR_AXIS))
        whole, by_shard = PartitionSpec(), PartitionSpec(DATA_AXIS)
        of_sums = whole if keeps_sums else None
        self._run = jax.jit(
            jax.shard_map(
                functools.partial(pool_lines, decoder, {}),
                mesh=mesh,
                in_specs=(by_shard, of_sums, whole),
                out_specs=PooledLines(of_sums, whole),  # type: ignore[arg-type]
                check_vma=False,
            )
        )
        self.hidden = np.random.default_rng(1).normal(size=(shards * SLOTS, SIZE)).astype(np.float32)
        self._sums = np.full((NUM_ROWS, len(kinds) * SIZE), 99, np.float32) if keeps_sums else None
        self._of_tokens = tuple(kinds) == ("tokens",)

    def pool(self, query: PoolQuery) -> np.ndarray:
        answers = []
        for packed in pack_pooling(query, NUM_LINES, of_tokens=self._of_tokens):
            pooled = self._run(self.hidden, self._sums, packed)
            self._sums = pooled.sums
            answers.append(pooled.vectors)
        return unpack_pooled(query, answers, of_tokens=self._of_tokens) / 2


def query(*parts: tuple[int, int, int, int, bool]) -> PoolQuery:
    """Of (row, first slot, tokens, start, ends)."""
    columns = [np.array(column, np.int32) for column in zip(*parts, strict=True)]
    return PoolQuery(*columns[:4], columns[4].astype(bool))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kinds", [*((kind,) for kind in WHOLE_KINDS), ("cls", "mean", "max")], ids="-".join)
def test_texts_of_a_step_are_pooled_as_defined(kinds: tuple[str, ...], shards: int) -> None:
    device = Device(kinds, shards=shards, keeps_sums=False)
    second = SLOTS * (shards - 1)
    places = [(0, 0, 3), (5, 3, 1), (2, second + 4, 7), (7, second + 11, 5), (1, 3, 1)]  # more than lines of a call
    found = device.pool(query(*((row, first, count, 0, True) for row, first, count in places)))
    for vector, (_, first, count) in zip(found, places, strict=True):
        wanted = np.concatenate([by_hand(kind, device.hidden[first : first + count]) for kind in kinds])
        np.testing.assert_allclose(vector, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kinds", [*((kind,) for kind in WHOLE_KINDS), ("mean", "last", "cls")], ids="-".join)
def test_a_text_in_parts_is_as_one_in_a_whole(kinds: tuple[str, ...]) -> None:
    device = Device(kinds)
    first, second = np.random.default_rng(2).normal(size=(2, 12, SIZE)).astype(np.float32)
    device.hidden[2:7], device.hidden[7:9] = first[:5], second[:2]
    assert not len(device.pool(query((3, 2, 5, 0, False), (4, 7, 2, 0, False))))
    device.hidden[0:4], device.hidden[5:15] = first[5:9], second[2:]
    (done,) = device.pool(query((3, 0, 4, 5, False), (4, 5, 10, 2, True)))
    device.hidden[1:4] = first[9:]
    (last,) = device.pool(query((3, 1, 3, 9, True)))
    for vector, states in ((last, first), (done, second)):
        np.testing.assert_allclose(vector, np.concatenate([by_hand(kind, states) for kind in kinds]), rtol=1e-5, atol=1e-6)
    # The row's next text has nothing of this one.
    (found,) = device.pool(query((3, 1, 3, 0, True)))
    np.testing.assert_allclose(found, np.concatenate([by_hand(kind, first[9:]) for kind in kinds]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shards", [1, 2])
def test_each_token_has_a_vector(shards: int) -> None:
    device = Device(("tokens",), shards=shards, keeps_sums=False)
    asked = query((0, 3, 2, 0, False), (1, SLOTS * (shards - 1) + 5, 6, 4, True))
    assert num_pooled(asked, of_tokens=True) == 8
    first = SLOTS * (shards - 1) + 5
    np.testing.assert_array_equal(device.pool(asked), device.hidden[[3, 4, *range(first, first + 6)]])


@pytest.mark.parametrize("kind", WHOLE_KINDS)
def test_what_is_no_number_shows_and_stays_with_its_text(kind: str) -> None:
    device = Device((kind,), keeps_sums=False)
    device.hidden[4:6] = np.nan  # one text's last token, and what nobody has asked about
    broken, whole = device.pool(query((0, 4, 1, 0, True), (1, 0, 3, 0, True)))
    assert np.isnan(broken).all()
    np.testing.assert_allclose(whole, by_hand(kind, device.hidden[:3]), rtol=1e-5, atol=1e-6)
