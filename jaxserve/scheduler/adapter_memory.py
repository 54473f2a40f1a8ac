"""AdapterMemory: which LoRA adapters are in the host's memory, and the commands to the runner that bring them there and away.

One command at a time, beside the steps. With a limit an adapter is forgotten for another: of those that no row uses, and that
no request needs which comes before whoever needs the other one, that which was used longest ago. It keeps its name, and is read
again for the next request. If there is none to forget, the one with the fewest rows is left to run out: requests behind do not
run with it any more. So everybody's turn comes, as it does with slots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from jaxserve.commands import CommandError, ForgetAdapter, ReadAdapter
from jaxserve.runner import Runner
from jaxserve.scheduler.adapter import Adapter, Stamp
from jaxserve.scheduler.adapter_slots import AdapterSlots
from jaxserve.scheduler.req import Place, Req

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """An adapter could not be read again."""

    reqs: list[Req]  # that need it
    message: str


@dataclasses.dataclass(frozen=True)
class _Job:
    """What the runner is doing."""

    adapter: Adapter
    command: ReadAdapter | ForgetAdapter
    done: Future[None]
    stamp: Stamp = ()  # of the files that are read


@dataclasses.dataclass(frozen=True)
class _Draining:
    adapter: Adapter
    place: Place  # nobody behind it runs with the adapter


class AdapterMemory:
    def __init__(self, runner: Runner, most: int | None, slots: AdapterSlots, place: Callable[[Req], Place | None]) -> None:
        """`most` adapters are in memory at a time; None: all. `place`: where a request stands; None: it may not run for now."""
        self._runner = runner
        self._most = most
        self._slots = slots
        self._place = place
        self._read: dict[Adapter, None] = {}  # those in memory
        self._wanted: dict[Adapter, None] = {}  # by requests, or to be loaded
        self._retired: dict[Adapter, None] = {}  # not forgotten yet
        self._job: _Job | None = None
        self._draining: _Draining | None = None
        self._num_given = 0  # ids
        self.num_reads = 0
        self.num_changes = 0  # rises whenever somebody may run who could not before

    def __len__(self) -> int:
        """Adapters in memory."""
        return len(self._read)

    @property
    def num_retired(self) -> int:
        return len(self._retired)

    @property
    def is_busy(self) -> bool:
        """There is something to do even if no request is there."""
        return self._job is not None or any(not adapter.users for adapter in self._retired)

    @property
    def awaits_reading(self) -> bool:
        """A request may have to wait although nothing runs."""
        return self._job is not None or self._draining is not None or bool(self._wanted)

    def want(self, adapter: Adapter) -> None:
        """It is to be read as soon as that is possible, if it is not in memory."""
        if not adapter.is_read:
            self._wanted[adapter] = None

    def retire(self, adapter: Adapter) -> None:
        """No new request gets it: it is forgotten when the last one has ended."""
        adapter.is_retired, adapter.is_pinned = True, False
        self._retired[adapter] = None
        self.num_changes += 1

    def is_forgotten(self, adapter: Adapter) -> bool:
        """Of one that was retired."""
        return adapter not in self._retired

    def holds_back(self, req: Req) -> bool:
        draining = self._draining
        return draining is not None and draining.adapter is req.adapter and self._is_behind(req, draining.place)

    def tend(self) -> Unreadable | None:
        """In every round of the loop: takes in what the runner has done, and begins what is next."""
        if self._job is not None:
            if not self._job.done.done():
                return None
            job, self._job = self._job, None
            if (unreadable := self._take_in(job)) is not None:
                return unreadable  # to be ended before anything is read for them again
        return self._begin_next()

    def _take_in(self, job: _Job) -> Unreadable | None:
        adapter, error = job.adapter, job.done.exception()
        self.num_changes += 1
        if error is not None and not isinstance(error, CommandError):
            logger.error("%s of the LoRA adapter %s failed.", type(job.command).__name__, adapter.name, exc_info=error)
        if isinstance(job.command, ReadAdapter):
            if error is not None:
                return self._fail(adapter, str(error) or type(error).__name__)
            adapter.is_read, adapter.stamp = True, job.stamp
            self._read[adapter] = None
            self._slots.used(adapter)
        return None

    def _fail(self, adapter: Adapter, problem: str) -> Unreadable | None:
        adapter.problem = problem
        self._wanted.pop(adapter, None)
        if not adapter.users:
            return None  # whoever loads it looks at the problem
        return Unreadable(list(adapter.users), f"The LoRA adapter {adapter.name!r} cannot be read again: {problem}")

    def _begin_next(self) -> Unreadable | None:
        before, self._draining = self._draining, None
        self._forget_retired()
        unreadable = None if self._job is not None else self._read_next(before)
        self.num_changes += self._draining != before
        return unreadable

    def _forget_retired(self) -> None:
        """One at a time; those that are not in memory are forgotten already."""
        for adapter in [adapter for adapter in self._retired if not adapter.users]:
            if adapter.is_read:
                self._forget(adapter)
                return
            del self._retired[adapter]

    def _read_next(self, before: _Draining | None) -> Unreadable | None:
        self._wanted = {one: None for one in self._wanted if not one.is_read and (one.users or one.load_place is not None)}
        if not self._wanted:
            return None
        adapter = min(self._wanted, key=lambda one: (self._place_of(one) is None, self._place_of(one) or ()))
        if self._most is None or len(self._read) < self._most:
            return self._begin_reading(adapter)
        place = self._place_of(adapter)
        others = [one for one in self._read if not one.is_pinned]
        spare = [one for one in others if not one.num_rows and all(self._is_behind(req, place) for req in one.users)]
        if spare:
            self._forget(min(spare, key=lambda one: (one.is_retired, one.used_at)))
        elif others and place is not None:
            fewest = min(others, key=lambda one: (one.is_retired, one.num_rows, one.used_at))
            self._draining = _Draining(before.adapter if before is not None and before.adapter in others else fewest, place)
        return None

    def _begin_reading(self, adapter: Adapter) -> Unreadable | None:
        stamp = _stamp(adapter.path)
        if adapter.stamp is not None and adapter.stamp != stamp:  # what is cached was computed with the old ones
            return self._fail(adapter, f"the files in {adapter.path} are not those that were loaded; load it again.")
        adapter.problem, adapter.adapter_id = "", self._num_given
        self._num_given += 1
        self.num_reads += 1
        command = ReadAdapter(adapter.adapter_id, adapter.path)
        self._job = _Job(adapter, command, self._runner.execute(command), stamp)
        return None

    def _forget(self, adapter: Adapter) -> None:
        self._slots.free(adapter)
        adapter.is_read = False
        del self._read[adapter]
        if adapter.users:
            self.want(adapter)
        command = ForgetAdapter(adapter.adapter_id)
        self._job = _Job(adapter, command, self._runner.execute(command))

    def _place_of(self, adapter: Adapter) -> Place | None:
        """That of the first of those that need it."""
        places = [place for req in adapter.users if (place := self._place(req)) is not None]
        return min(places if adapter.load_place is None else [adapter.load_place, *places], default=None)

    def _is_behind(self, req: Req, place: Place | None) -> bool:
        own = self._place(req)
        return place is not None and (own is None or own > place)


def _stamp(folder: str) -> Stamp:
    """What tells whether its files were replaced."""
    with contextlib.suppress(OSError):
        stats = sorted((path.name, path.stat()) for path in Path(folder).iterdir())
        return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return ()
