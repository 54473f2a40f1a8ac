"""How many pages the pool of each KV group gets (in each shard): arithmetic over a RunnerSpec, whose own pools do not matter.

The first group sees furthest, most often everything; the pools of the others, which see a window, follow from its size. They
hold `swa_full_tokens_ratio` tokens for each of its tokens, but no more than request rows can use, and no less than one request
needs so that it can always go on.
"""

from __future__ import annotations

import bisect
import math

from jaxserve.runner import KVGroup, RunnerSpec

# Windows for each request row: one running, the others of cached prefixes, each of which needs its last window only.
WINDOWS_PER_ROW = 8
# One runs, one waits for it on the device, one is planned.
STEPS_AT_A_TIME = 3


def useful_pages(spec: RunnerSpec, group: KVGroup) -> int:
    """What the request rows could use twice over: once running, once cached. Windows take less, so more of them are cached.
    What is kept during a step only is wanted for the steps that are launched or planned at a time."""
    if not spec.keeps_kv:
        return STEPS_AT_A_TIME * (_pages(spec.max_step_tokens, spec) + spec.rows_per_shard)
    twice = 2 * spec.rows_per_shard * spec.max_pages_per_row
    kept = group.kept_tokens(spec.context_len, spec.page_size)
    return min(_pages(WINDOWS_PER_ROW * spec.rows_per_shard * kept + spec.max_step_tokens, spec), twice)


def pools_of(spec: RunnerSpec, swa_full_tokens_ratio: float, first_pages: int) -> tuple[int, ...]:
    """All pools, that of the first group as given. They never shrink when it grows."""

    def follow(group: KVGroup) -> int:
        assert group.window is not None, spec.kv_groups
        wanted = min(math.ceil(swa_full_tokens_ratio * first_pages), useful_pages(spec, group))
        goes_on = _pages(group.window + spec.max_step_tokens + 2 * spec.page_size, spec)
        return min(max(wanted, goes_on), first_pages)

    return first_pages, *map(follow, spec.kv_groups[1:])


def first_pool_that_fits(
    spec: RunnerSpec, swa_full_tokens_ratio: float, page_bytes: tuple[int, ...], available_bytes: int
) -> int:
    """Most pages of the first group that fit with the pools that follow from them; page_bytes are those of each group."""

    def taken(first_pages: int) -> int:
        return pool_bytes(pools_of(spec, swa_full_tokens_ratio, first_pages), page_bytes)

    # Of a pipeline's stage that has no layers of the first group, as many as can be used.
    most = max(available_bytes, 0) // page_bytes[0] if page_bytes[0] else useful_pages(spec, spec.kv_groups[0])
    candidates = range(most + 1)
    return max(bisect.bisect_right(candidates, available_bytes, key=taken) - 1, 0)


def pool_bytes(num_pages: tuple[int, ...], page_bytes: tuple[int, ...]) -> int:
    """Of all pools, from the pages of each and what a page takes there."""
    return sum(count * size for count, size in zip(num_pages, page_bytes, strict=True))


def num_requests(groups: tuple[KVGroup, ...], page_size: int, length: int) -> int:
    """How many sequences of `length` tokens the pools hold between two steps."""
    return min(group.num_pages * page_size // group.kept_tokens(length, page_size) for group in groups)


def longest_of(groups: tuple[KVGroup, ...], page_size: int, count: int, limit: int) -> int:
    """How long `count` sequences can be at once, at most `limit` tokens; 0 where there is no room for so many."""
    lengths = range(1, limit + 1)
    return bisect.bisect_right(lengths, -count, key=lambda length: -num_requests(groups, page_size, length))


def _pages(tokens: int, spec: RunnerSpec) -> int:
    return -(-tokens // spec.page_size)
