"""Load balancing policies: which of the replicas that serve gets a request.

Each returns one of the candidates, given in the order of their ranks, and is told which one got the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxserve.data_parallel.prefix_index import PrefixIndex
from jaxserve.data_parallel.prompt import Prompt
from jaxserve.data_parallel.replica import Replica

# What a token that a replica lacks costs, in tokens that wait there: it is computed, and pushes another out of the cache.
# With 1, idle replicas copy prefixes that would soon be found elsewhere (benchmarks/replica_routing.py under load: 78 % of
# prompt tokens cached in place of 86 %); more than 2 gains nothing.
_MISS_WEIGHT = 2.0


class LoadBalancePolicy(Protocol):
    def choose(self, candidates: Sequence[Replica], prompt: Prompt) -> Replica: ...

    def dispatched(self, replica: Replica, prompt: Prompt) -> int:
        """It gets the request. Returns how many of the prompt's tokens it has probably cached."""
        ...

    def set_capacity(self, rank: int, num_tokens: int) -> None:
        """How many tokens the replica's cache has room for."""
        ...

    def forget(self, rank: int) -> None:
        """The replica's cache is empty now."""
        ...


class ByLoad:
    """The least of some measure of each replica's work; among equals the one that has waited longest for a request."""

    def __init__(self, measure: Callable[[Replica], tuple[float, ...]]) -> None:
        self._measure = measure

    def choose(self, candidates: Sequence[Replica], prompt: Prompt) -> Replica:
        return min(candidates, key=lambda replica: (*self._measure(replica), replica.last_dispatch))

    def dispatched(self, replica: Replica, prompt: Prompt) -> int:
        return 0

    def set_capacity(self, rank: int, num_tokens: int) -> None:
        pass

    def forget(self, rank: int) -> None:
        pass


def round_robin() -> ByLoad:
    return ByLoad(lambda replica: ())


def shortest_queue() -> ByLoad:
    return ByLoad(lambda replica: (replica.num_sequences,))


def total_tokens() -> ByLoad:
    return ByLoad(lambda replica: (replica.num_tokens + replica.pending_output_tokens, replica.num_sequences))


class CacheAware:
    """The replica that has the least to compute until this prompt is done: what it lacks of it, and what others wait for there.

    No threshold says when load matters more than the cache: both are tokens. So a prefix that everybody has stays where it is
    until the queue there costs more than computing it once more, which then happens, and both places have it.
    """

    def __init__(self, num_replicas: int) -> None:
        self._index = PrefixIndex(num_replicas)

    def choose(self, candidates: Sequence[Replica], prompt: Prompt) -> Replica:
        cached = self._index.cached_lens(prompt)

        def cost(replica: Replica) -> tuple[float, int, int]:
            waits = replica.pending_prefill_tokens + replica.pending_output_tokens
            return (_MISS_WEIGHT * (prompt.length - cached[replica.rank]) + waits, replica.num_sequences, replica.last_dispatch)

        return min(candidates, key=cost)

    def dispatched(self, replica: Replica, prompt: Prompt) -> int:
        return self._index.insert(replica.rank, prompt)

    def set_capacity(self, rank: int, num_tokens: int) -> None:
        self._index.set_capacity(rank, num_tokens)

    def forget(self, rank: int) -> None:
        self._index.clear(rank)


def make_policy(method: str, num_replicas: int, *, has_prefix_cache: bool = True) -> LoadBalancePolicy:
    """Of a --load-balance-method."""
    if num_replicas == 1:
        return round_robin()  # there is no choice, and nothing to remember for it
    if method == "auto":
        method = "cache_aware" if has_prefix_cache else "shortest_queue"
    if method == "cache_aware":
        return CacheAware(num_replicas)
    simple = {
        "round_robin": round_robin,
        "shortest_queue": shortest_queue,
        "total_requests": shortest_queue,
        "total_tokens": total_tokens,
    }
    return simple[method]()
