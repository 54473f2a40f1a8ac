"""AdapterSlots: which LoRA adapter is in which slot of the devices.

A request takes a slot for its adapter when it is given a row: the one that the adapter has, or a free one, or one whose adapter
no row uses. Steps are ordered on the device, so a slot may be overwritten as soon as no row of a step to come uses it.

Who finds no slot must get one in the end, whoever else comes. So the first of those that wait claims one slot: requests behind
that one do not run with the adapter that is in there, and when the last row that uses it has ended the slot goes to the
claimant's adapter and to no other. A claim thus ends after the rows that run and the requests before the claimant; then the
next one claims.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from jaxserve.runner import AdapterLoad
from jaxserve.scheduler.adapter import Adapter
from jaxserve.scheduler.req import Place, Req, RequestState


@dataclasses.dataclass(frozen=True)
class _Claim:
    req: Req
    slot: int


class AdapterSlots:
    def __init__(self, num_slots: int, policy: str, place: Callable[[Req], Place | None]) -> None:
        """`policy`: lru or fifo. `place`: where a waiting request stands; None: it may not run for now."""
        self._slots: list[Adapter | None] = [None] * num_slots
        self._is_fifo = policy == "fifo"
        self._place = place
        self._claim: _Claim | None = None
        self._times = itertools.count()
        self._loads: list[AdapterLoad] = []  # for the next step
        self.num_evictions = 0
        self.num_changes = 0  # rises whenever somebody may have a slot who could not before

    def __len__(self) -> int:
        """Slots that hold an adapter."""
        return sum(adapter is not None for adapter in self._slots)

    def may_use(self, req: Req, adapter: Adapter) -> bool:
        """Whether the request could be given a row now, as far as slots go."""
        if adapter.slot is None:
            return self._slot_for(adapter) is not None
        claim = self._claim
        return claim is None or claim.slot != adapter.slot or self._is_before(req, claim.req)

    def claim_for(self, lacking: Req) -> None:
        """`lacking`: the first of those that wait for nothing but a slot."""
        if self._claim is not None and not self._is_before(lacking, self._claim.req):
            return
        if self._claim is not None:
            slot = self._claim.slot  # which is being emptied already
        else:
            used = [adapter for adapter in self._slots if adapter is not None and not adapter.is_pinned]
            first = min(used, key=lambda adapter: (adapter.num_rows, self._age(adapter)))
            assert first.slot is not None
            slot = first.slot
        self._claim = _Claim(lacking, slot)
        self.num_changes += 1

    def check_claim(self) -> None:
        """Before anybody is chosen: a claim is over if its request does not wait any more, or not for a slot."""
        if self._claim is None:
            return
        req, adapter = self._claim.req, self._claim.req.adapter
        is_waiting = req.state is RequestState.WAITING and self._place(req) is not None
        if not is_waiting or adapter is None or not adapter.is_read or adapter.slot is not None:
            self._claim = None
            self.num_changes += 1

    def take(self, adapter: Adapter) -> None:
        """For a request that was just given a row, which is in the next step."""
        if adapter.slot is None:
            slot = self._slot_for(adapter)
            assert slot is not None, f"adapter {adapter.name} finds no slot"
            if (other := self._slots[slot]) is not None:
                self.free(other)
                self.num_evictions += 1
            self._slots[slot], adapter.slot, adapter.loaded_at = adapter, slot, next(self._times)
            self._loads.append(AdapterLoad(slot, adapter.adapter_id))
        adapter.num_rows += 1
        self.used(adapter)

    def leave(self, adapter: Adapter) -> None:
        """A row that used it takes part in no step to come."""
        adapter.num_rows -= 1
        self.used(adapter)
        self.num_changes += adapter.num_rows == 0

    def used(self, adapter: Adapter) -> None:
        adapter.used_at = next(self._times)

    def free(self, adapter: Adapter) -> None:
        """No row uses it."""
        assert not adapter.num_rows, f"{adapter.num_rows} rows use adapter {adapter.name}"
        if adapter.slot is not None:
            self._slots[adapter.slot], adapter.slot = None, None
            self.num_changes += 1

    def take_loads(self) -> list[AdapterLoad]:
        """What goes into slots before the next step."""
        loads, self._loads = self._loads, []
        return loads

    def _slot_for(self, adapter: Adapter) -> int | None:
        """For one that has none: the one claimed for it, a free one, or that of the first one to go."""
        claimed = None if self._claim is None else self._claim.slot
        if self._claim is not None and self._claim.req.adapter is adapter:
            claimed = None
        idle: list[Adapter] = []
        for slot, other in enumerate(self._slots):
            if slot == claimed:
                continue
            if other is None:
                return slot
            if not other.num_rows and not other.is_pinned:
                idle.append(other)
        return min(idle, key=self._age).slot if idle else None

    def _age(self, adapter: Adapter) -> int:
        return adapter.loaded_at if self._is_fifo else adapter.used_at

    def _is_before(self, req: Req, other: Req) -> bool:
        """Whoever may not run for now is behind all others."""
        mine, theirs = self._place(req), self._place(other)
        return mine is not None and (theirs is None or mine < theirs)
