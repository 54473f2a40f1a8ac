"""How large each KV group's pool is."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.executor.pool_sizes import first_pool_that_fits, longest_of, num_requests, pool_bytes, pools_of, useful_pages
from jaxserve.runner import KVGroup, RunnerSpec


def spec(*windows: int | None, **changes: Any) -> RunnerSpec:
    values: dict[str, Any] = {
        "page_size": 16,
        "kv_groups": tuple(KVGroup(1, window) for window in windows),
        "max_rows": 10,
        "context_len": 3200,
        "max_step_tokens": 256,
        "vocab_size": 1,
        "hidden_size": 1,
        "eos_token_ids": (),
        "max_top_logprobs": 0,
    }
    return RunnerSpec(**(values | changes))


TWO = spec(None, 128)
GOES_ON = (128 + 256 + 2 * 16) // 16  # pages of a window with which one request can always go on
USEFUL = (8 * 10 * (128 + 2 * 16) + 256) // 16


@pytest.mark.parametrize(
    ("made", "ratio", "first", "expected"),
    [
        (spec(None), 0.5, 7, (7,)),
        (spec(128), 0.5, 7, (7,)),  # the only pool is the first
        (TWO, 0.5, 200, (200, 100)),
        (TWO, 0.25, 401, (401, 101)),  # rounded up
        (TWO, 1.0, 200, (200, 200)),
        (TWO, 0.5, 40, (40, GOES_ON)),
        (TWO, 0.5, 20, (20, 20)),  # never more than the first
        (TWO, 0.5, 10_000, (10_000, USEFUL)),
        (TWO, 0.001, 10_000, (10_000, GOES_ON)),
        (spec(None, 512, 128), 0.5, 2000, (2000, 1000, USEFUL)),
        (spec(512, 128), 0.5, 2000, (2000, USEFUL)),
    ],
)
def test_pools_follow_from_the_first(made: RunnerSpec, ratio: float, first: int, expected: tuple[int, ...]) -> None:
    assert pools_of(made, ratio, first) == expected


def test_what_rows_can_use() -> None:
    assert useful_pages(TWO, KVGroup(1)) == 2 * 10 * 3200 // 16
    assert useful_pages(TWO, KVGroup(1, 128)) == USEFUL
    assert useful_pages(TWO, KVGroup(1, 3199)) == 2 * 10 * 3200 // 16  # no more than whole sequences take


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("available", [0, 3, 300, 12_345, 10**6])
def test_the_most_that_fits(ratio: float, available: int) -> None:
    """What a capped window leaves goes to the first pool."""
    page_bytes = (3, 15)

    def taken(first: int) -> int:
        return pool_bytes(pools_of(TWO, ratio, first), page_bytes)

    found = first_pool_that_fits(TWO, ratio, page_bytes, available)
    assert taken(found) <= available < taken(found + 1)


def test_one_sequence_alone_goes_on() -> None:
    for first in (5, 20, 27, 40, 300):
        pools = pools_of(TWO, 0.001, first)
        alone = spec(None, 128, kv_groups=(KVGroup(pools[0]), KVGroup(pools[1], 128)))
        assert alone.max_sequence_tokens == min(first * 16, 3200)  # the full pool alone decides


def test_how_many_and_how_long() -> None:
    groups = (KVGroup(100), KVGroup(40, 128))
    assert num_requests(groups, 16, 100) == 6  # the window is not full yet: 40 pages of 640 tokens
    assert num_requests(groups, 16, 400) == 4  # 1600 tokens; 640 of 160 each
    assert num_requests(groups, 16, 1600) == 1
    assert longest_of(groups, 16, 4, 1000) == 400
    assert longest_of(groups, 16, 4, 300) == 300
    assert longest_of(groups, 16, 5, 1000) == 128
    assert longest_of(groups, 16, 10_000, 1000) == 0
