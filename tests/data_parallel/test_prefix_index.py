"""What a replica has probably cached, from what it was sent."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.data_parallel.prefix_index import PrefixIndex
from jaxserve.data_parallel.prompt import BLOCK_TOKENS, Prompt

B = BLOCK_TOKENS


def prompt(*parts: int, length: int = B, namespace: str | None = None) -> Prompt:
    """`length` tokens for each part, that differ between parts."""
    rows = [np.arange(length, dtype=np.int32) + 1000 * part for part in parts]
    return Prompt(np.concatenate(rows) if rows else np.zeros(0, np.int32), namespace)


def test_equal_beginnings_have_equal_hashes_and_others_do_not() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 200_000, 40 * B).astype(np.int32)
    hashes = Prompt(base).hashes
    assert len(hashes) == len(set(hashes)) == 40
    for place in (0, 5 * B, 5 * B + 7, 40 * B - 1):
        changed = base.copy()
        changed[place] += 1
        assert [a == b for a, b in zip(hashes, Prompt(changed).hashes, strict=True)] == [i < place // B for i in range(40)]
    assert Prompt(base[: 7 * B + 9]).hashes == hashes[:7], "whole blocks alone"
    assert Prompt(np.roll(base, 1)).hashes[0] != hashes[0], "places count"
    assert not set(Prompt(base, "tenant").hashes) & set(hashes)
    assert Prompt(base, "").hashes != hashes, "an empty namespace is one, too"
    assert Prompt(np.zeros(0, np.int32)).hashes == Prompt(base[: B - 1]).hashes == []


def test_zeros_and_repetitions_are_told_apart() -> None:
    zeros = np.zeros(8 * B, np.int32)
    assert len(set(Prompt(zeros).hashes)) == 8
    periodic = np.tile(np.arange(B, dtype=np.int32), 8)
    assert len(set(Prompt(periodic).hashes) | set(Prompt(zeros).hashes)) == 16


def test_each_replica_has_what_it_was_sent() -> None:
    index = PrefixIndex(3)
    index.insert(0, prompt(1, 2, 3))
    index.insert(2, prompt(1, 2, 9))
    assert index.cached_lens(prompt(1, 2, 3, 4)) == [3 * B, 0, 2 * B]
    assert index.cached_lens(prompt(1)) == [B, 0, B]
    assert index.cached_lens(prompt(5)) == [0, 0, 0]
    assert index.cached_lens(prompt(1, 2, namespace="x")) == [0, 0, 0]
    index.clear(0)
    assert index.cached_lens(prompt(1, 2, 3)) == [0, 0, 2 * B]
    index.clear(2)
    assert len(index) == 0


def test_the_ends_of_what_was_used_longest_ago_go_first() -> None:
    index = PrefixIndex(2)
    index.set_capacity(0, 6 * B)
    index.insert(0, prompt(1, 2, 3))
    index.insert(0, prompt(7, 8, 9))
    index.insert(0, prompt(1))  # used again: its beginning alone
    index.insert(0, prompt(4, 5))
    assert index.cached_lens(prompt(1, 2, 3))[0] == B
    assert index.cached_lens(prompt(7, 8, 9))[0] == 3 * B
    assert index.cached_lens(prompt(4, 5))[0] == 2 * B
    index.set_capacity(0, 0)
    assert len(index) == 0
    index.insert(1, prompt(*range(50)))
    assert index.cached_lens(prompt(*range(50))) == [0, 50 * B], "no capacity known: everything is kept"


@pytest.mark.parametrize("seed", range(3))
def test_against_sets_of_prefixes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    index, sent = PrefixIndex(4), [set() for _ in range(4)]
    for _ in range(200):
        parts = tuple(rng.integers(0, 3, rng.integers(0, 6)).tolist())
        expected = [max(n for n in range(len(parts) + 1) if parts[:n] in known or n == 0) * B for known in sent]
        assert index.cached_lens(prompt(*parts)) == expected
        rank = int(rng.integers(4))
        assert index.insert(rank, prompt(*parts)) == expected[rank]
        sent[rank] |= {parts[:n] for n in range(1, len(parts) + 1)}
