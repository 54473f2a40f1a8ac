"""The order of the waiting queue under each policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.cache import CacheManager, ShardedCache
from jaxserve.runner import KVGroup
from jaxserve.scheduler import policy as policy_module
from jaxserve.scheduler.policy import SchedulePolicy
from jaxserve.scheduler.req import Req
from jaxserve.types import SamplingParams


def make_req(rid: str, tokens: list[int], **fields: Any) -> Req:
    values = {"max_new_tokens": 8} | fields
    return Req(rid=rid, prompt_ids=np.array(tokens, np.int32), sampling=SamplingParams(), seed=0, **values)


def make_cache(*prefixes: list[int], disable_radix: bool = False) -> ShardedCache:
    cache = CacheManager(groups=(KVGroup(256),), page_size=1, max_rows=8, max_pages_per_row=64, disable_radix=disable_radix)
    for prefix in prefixes:
        tokens = np.array(prefix, np.int32)
        lease = cache.admit(tokens)
        assert lease is not None and cache.grow(lease, 0, len(tokens))
        cache.release(lease, tokens)
    return ShardedCache([cache])


def order(name: str, cache: ShardedCache, reqs: list[Req], by_urgency: bool = False) -> str:
    before = list(reqs)
    policy = SchedulePolicy(name, cache, by_urgency=by_urgency, rng=np.random.default_rng(0))
    ordered = policy.order(reqs)
    assert reqs == before, "the queue itself must not change"
    assert sorted(req.rid for req in ordered) == sorted(req.rid for req in reqs)
    return "".join(req.rid for req in ordered)


def test_fcfs_keeps_the_order_of_arrival() -> None:
    assert order("fcfs", make_cache(), [make_req(rid, [1]) for rid in "abc"]) == "abc"


def test_lof_puts_the_longest_output_first() -> None:
    reqs = [make_req(rid, [1], max_new_tokens=most) for rid, most in (("a", 3), ("b", 9), ("c", 9), ("d", 5))]
    assert order("lof", make_cache(), reqs) == "bcda"


def test_random_shuffles() -> None:
    reqs = [make_req(chr(97 + i), [1]) for i in range(20)]
    assert order("random", make_cache(), reqs) != "".join(req.rid for req in reqs)


def test_lpm_puts_the_longest_cached_prefix_first() -> None:
    cache = make_cache([1, 2, 3, 4, 5, 6])
    reqs = [make_req("a", [9, 9]), make_req("b", [1, 2, 9]), make_req("c", [1, 2, 3, 4, 9]), make_req("d", [1, 2, 8])]
    assert order("lpm", cache, reqs) == "cbda"


def test_lpm_looks_at_the_first_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "MAX_MATCHED_REQUESTS", 2)
    cache = make_cache([1, 2, 3, 4, 5, 6])
    reqs = [make_req("a", [9, 9]), make_req("b", [1, 2, 9]), make_req("c", [1, 2, 3, 4, 9])]
    assert order("lpm", cache, reqs) == "bac"


@pytest.mark.parametrize("name", ["lpm", "dfs-weight"])
def test_without_a_tree_cache_aware_policies_are_fcfs(name: str) -> None:
    cache = make_cache([1, 2, 3, 4], disable_radix=True)
    reqs = [make_req("a", [9, 9]), make_req("b", [1, 2, 3, 4])]
    assert order(name, cache, reqs) == "ab"
    assert not SchedulePolicy(name, cache, by_urgency=False, rng=np.random.default_rng(0)).reorders


def test_dfs_weight_keeps_subtrees_together_the_heaviest_first() -> None:
    cache = make_cache([1, 1, 1], [1, 1, 2], [5, 5, 5], [5, 5, 6])
    reqs = [
        make_req("a", [1, 1, 1, 9]),
        make_req("b", [5, 5, 5, 9]),
        make_req("c", [9]),  # matches nothing
        make_req("d", [5, 5, 6, 9]),
        make_req("e", [1, 1, 2, 9]),
        make_req("f", [5, 5, 5, 8]),
        make_req("g", [5, 5, 9]),  # ends at the inner node
    ]
    # The subtree of 5 holds four requests, that of 1 two; inside it 5 5 5 holds two; a node's own come after its children's.
    assert order("dfs-weight", cache, reqs) == "bfdgaec"


@pytest.mark.parametrize("name", ["fcfs", "lof", "random", "lpm", "dfs-weight"])
def test_retracted_requests_go_first(name: str) -> None:
    cache = make_cache([1, 2, 3, 4])
    reqs = [make_req(rid, [9], has_begun=True, max_new_tokens=1) for rid in "ab"]
    reqs += [make_req("c", [1, 2, 3, 9]), make_req("d", [1, 2, 9], max_new_tokens=20)]
    assert order(name, cache, reqs).startswith("ab")


def test_urgency_goes_before_everything() -> None:
    reqs = [make_req(rid, [1], urgency=urgency) for rid, urgency in (("a", 0), ("b", 5), ("c", -1), ("d", 5))]
    assert order("fcfs", make_cache(), reqs, by_urgency=True) == "bdac"
    assert order("priority", make_cache(), reqs) == "bdac"


def test_urgency_before_output_length() -> None:
    reqs = [make_req("a", [1], urgency=1, max_new_tokens=2), make_req("b", [1], max_new_tokens=9)]
    reqs += [make_req("c", [1], urgency=1, max_new_tokens=4)]
    assert order("lof", make_cache(), reqs, by_urgency=True) == "cab"


def test_which_policies_let_newcomers_overtake() -> None:
    rng = np.random.default_rng(0)
    assert not SchedulePolicy("fcfs", make_cache(), by_urgency=False, rng=rng).reorders
    for name, by_urgency in (("fcfs", True), ("priority", False), ("lof", False), ("random", False), ("lpm", False)):
        assert SchedulePolicy(name, make_cache(), by_urgency=by_urgency, rng=rng).reorders
