"""ShardRoom: what one shard's share of a prefill step still takes, and what it costs to put a request there.

The cost follows the replicas' policy (`data_parallel.policies`), with numbers that are exact here: tokens that would have to be
computed, twice, and those that the shard's requests use or are about to compute. So a prefix that one shard has stays where it
is until that costs more than computing it once more.
"""

from __future__ import annotations

import dataclasses

from jaxserve.cache.manager import CacheManager
from jaxserve.scheduler.kv_demand import KVDemand
from jaxserve.scheduler.prefill_item import PrefillItem
from jaxserve.scheduler.req import Req

# What a token that a shard lacks costs, in tokens that are used there: it is computed, and pushes another out of the cache.
_MISS_WEIGHT = 2


@dataclasses.dataclass(eq=False)
class ShardRoom:
    cache: CacheManager
    demand: KVDemand  # of the running requests, and of those added; grows
    step_left: int  # tokens of its share of the step
    is_alone: bool  # nothing ran here, before this step, that could ever give memory back
    items: list[PrefillItem] = dataclasses.field(default_factory=list)
    is_closed: bool = False  # its chunked request could not go on: nobody else may take what that one needs
    chunked_req: Req | None = None  # the request whose prompt is not complete after this step
    chunked_left: int = 0  # tokens of it that are still to be computed then

    def restart(self, demand: KVDemand) -> None:
        """After a preemption: other requests run than before."""
        self.demand = demand
        for item in self.items:
            demand.add(item.end, item.expected_len)
        self.is_alone = not self.cache.num_leases

    def take(self, item: PrefillItem, share_tokens: int) -> None:
        """`share_tokens`: what it takes of the share."""
        self.items.append(item)
        self.step_left -= share_tokens
        self.demand.add(item.end, item.expected_len)
        if not item.is_last:
            self.chunked_req, self.chunked_left = item.req, item.fill_len - item.end

    def close(self, chunked_req: Req) -> None:
        self.is_closed, self.chunked_req = True, chunked_req

    def cost(self, missing_tokens: int) -> tuple[int, int]:
        """Of a request for which so many tokens would have to be computed; the least is best."""
        return _MISS_WEIGHT * missing_tokens + self.cache.used_tokens + self.chunked_left, self.cache.num_leases
