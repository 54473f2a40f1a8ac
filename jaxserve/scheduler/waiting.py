"""WaitingQueue: the requests that hold nothing yet, in order of arrival; retracted ones stand in front.

It knows who stands beyond the queue's limit, and counts its tokens. Which request goes next is the policy's business. What it
does for one request costs the same however many others wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

from jaxserve.scheduler.req import Place, Req


class WaitingQueue:
    def __init__(self, *, max_len: int | None, evicts_by_priority: bool) -> None:
        """With `evicts_by_priority` a full queue gives up its least urgent requests, else its latest."""
        self.max_len = max_len
        self._evicts_by_priority = evicts_by_priority
        # Both in order of arrival; dicts, so that anybody can leave from anywhere.
        self._begun: dict[Req, None] = {}  # retracted: somebody has seen their first tokens
        self._fresh: dict[Req, None] = {}
        self.only_begun = False  # requests that never ran have to wait: only retracted ones may be admitted
        self.pending_tokens = 0  # to prefill, not counting what the cache will spare
        self.num_pushed = 0  # ever; a change may unblock a policy that reorders
        self.num_removed = 0  # ever, without having been admitted

    def __len__(self) -> int:
        return len(self._begun) + len(self._fresh)

    def __iter__(self) -> Iterator[Req]:
        return itertools.chain(self._begun, self._fresh)

    def admissible(self, most: int | None = None) -> list[Req]:
        """The first `most` of those that may be admitted."""
        return list(itertools.islice(self.all_admissible(), most))

    def all_admissible(self) -> Iterable[Req]:
        return self._begun if self.only_begun else self

    def place(self, req: Req) -> Place | None:
        """By urgency, then by arrival. None: it may not be admitted for now. Of requests that are on their way here, too."""
        return None if self.only_begun and not req.has_begun else (-req.urgency, req.arrival)

    @property
    def has_begun_ones(self) -> bool:
        return bool(self._begun)

    @property
    def num_begun(self) -> int:
        return len(self._begun)

    def push(self, req: Req) -> None:
        self._fresh[req] = None
        self.pending_tokens += req.fill_len
        self.num_pushed += 1

    def beyond_limit(self, not_counted: Sequence[Req] = ()) -> list[Req]:
        """Those for whom the queue is too full, to ask when all were tried: a request that can run does not wait. Retracted
        ones have given out tokens already; they keep their place and do not count."""
        if self.max_len is None or len(self._fresh) <= self.max_len:
            return []
        spared = self._fresh.keys() & set(not_counted)
        excess = max(len(self._fresh) - len(spared) - self.max_len, 0)
        queued = (req for req in reversed(self._fresh) if req not in spared)
        if self._evicts_by_priority:
            return heapq.nsmallest(excess, queued, key=lambda req: req.urgency)
        return list(itertools.islice(queued, excess))

    def gave_way(self, refused: Sequence[Req]) -> set[Req]:
        """Of those beyond the limit, who stood here before a more urgent one came that stays."""
        if not self._evicts_by_priority:
            return set()
        gone = set(refused)
        newest = next((req.arrival for req in reversed(self._fresh) if req not in gone), -1)
        return {req for req in refused if req.arrival < newest}

    def push_front(self, reqs: Sequence[Req]) -> None:
        """Puts retracted requests before all others; those and the ones retracted earlier stand in the order they arrived."""
        self._begun = dict.fromkeys(sorted([*self._begun, *reqs], key=lambda req: req.arrival))
        self.pending_tokens += sum(req.fill_len for req in reqs)
        self.num_pushed += len(reqs)

    def remove(self, reqs: Sequence[Req]) -> None:
        """Takes out requests that end without having been admitted."""
        self._take_out(reqs)
        self.num_removed += len(reqs)

    def drop_admitted(self, admitted: Sequence[Req]) -> None:
        """Takes out those that hold a row now."""
        self._take_out(admitted)

    def _take_out(self, reqs: Sequence[Req]) -> None:
        for req in reqs:
            del (self._begun if req in self._begun else self._fresh)[req]
            self.pending_tokens -= req.fill_len
