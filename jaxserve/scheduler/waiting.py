"""WaitingQueue: the requests that hold nothing yet, in order of arrival; retracted ones stand in front.

It knows who stands beyond the queue's limit, and counts its tokens. Which request goes next is the policy's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxserve.scheduler.req import Req, RequestState


class WaitingQueue:
    def __init__(self, *, max_len: int | None, evicts_by_priority: bool) -> None:
        """With `evicts_by_priority` a full queue gives up its least urgent requests, else its latest."""
        self.max_len = max_len
        self._evicts_by_priority = evicts_by_priority
        self._items: list[Req] = []
        self.only_begun = False  # requests that never ran have to wait: only retracted ones may be admitted
        self.pending_tokens = 0  # to prefill, not counting what the cache will spare
        self.num_pushed = 0  # ever; a change may unblock a policy that reorders
        self.num_removed = 0  # ever, without having been admitted

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._items)

    @property
    def items(self) -> list[Req]:
        """Those that may be admitted, to read."""
        return [req for req in self._items if req.num_retractions] if self.only_begun else self._items

    def push(self, req: Req) -> None:
        self._items.append(req)
        self.pending_tokens += req.fill_len
        self.num_pushed += 1

    def beyond_limit(self, not_counted: Sequence[Req] = ()) -> list[Req]:
        """Those for whom the queue is too full, to ask when all were tried: a request that can run does not wait. Retracted
        ones have given out tokens already; they keep their place and do not count."""
        if self.max_len is None or len(self._items) <= self.max_len:
            return []
        spared = set(map(id, not_counted))
        queued = [req for req in reversed(self._items) if not req.num_retractions and id(req) not in spared]
        if self._evicts_by_priority:
            queued.sort(key=lambda req: req.urgency)
        return queued[: max(len(queued) - self.max_len, 0)]

    def push_front(self, reqs: Sequence[Req]) -> None:
        """Puts retracted requests before all others; those and the ones retracted earlier stand in the order they arrived."""
        num_retracted = sum(1 for req in self._items if req.num_retractions)
        self._items[:num_retracted] = sorted([*self._items[:num_retracted], *reqs], key=lambda req: req.arrival)
        self.pending_tokens += sum(req.fill_len for req in reqs)
        self.num_pushed += len(reqs)

    def remove(self, reqs: Sequence[Req]) -> None:
        """Takes out requests that end without having been admitted."""
        gone = set(map(id, reqs))
        self._items = [req for req in self._items if id(req) not in gone]
        self.pending_tokens -= sum(req.fill_len for req in reqs)
        self.num_removed += len(gone)

    def drop_admitted(self, admitted: Sequence[Req]) -> None:
        """Takes out those that hold a row now."""
        self._items = [req for req in self._items if req.state is RequestState.WAITING]
        self.pending_tokens -= sum(req.fill_len for req in admitted)
