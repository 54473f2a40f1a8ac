"""Adapters: the LoRA adapters that a scheduler knows by name, and which requests may run with theirs.

    load / unload   a name means a new version, or nothing; an old version goes when its last request has ended
    join / leave    requests, from their message to their end; what they need is read from then on
    choose          those of the waiting requests that can be given a row now; the others do not keep them from it
    slots, memory   what is on the devices and in the host's memory: `adapter_slots`, `adapter_memory`

It knows neither rows nor pages, and nothing of what is in an adapter's folder.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from jaxserve.commands import CommandError
from jaxserve.config import ServerArgs
from jaxserve.config.lora import split_lora_path
from jaxserve.runner import Runner
from jaxserve.scheduler.adapter import Adapter
from jaxserve.scheduler.adapter_memory import AdapterMemory
from jaxserve.scheduler.adapter_slots import AdapterSlots
from jaxserve.scheduler.control.declaration import ControlError
from jaxserve.scheduler.req import Req
from jaxserve.scheduler.waiting import WaitingQueue

_POLL_S = 0.001  # while the server starts
_NOT_ENABLED = "LoRA adapters need a server that runs with --enable-lora."


class Adapters:
    def __init__(self, args: ServerArgs, runner: Runner, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self._num_slots = runner.spec.num_adapter_slots
        self._most_pinned = min(self._num_slots, args.max_loaded_loras or self._num_slots) - 1
        self.slots = AdapterSlots(self._num_slots, args.lora_eviction_policy, waiting.place)
        self.memory = AdapterMemory(runner, args.max_loaded_loras, self.slots, waiting.place)
        self._registered: dict[str, Adapter] = {}  # in order of loading
        self._loading: dict[str, Adapter] = {}  # to be registered once they are read
        self._versions = itertools.count()
        self._newest_arrival = -1

    # --- by name

    @property
    def loaded(self) -> dict[str, str]:
        """By name, in order of loading: the folders."""
        return {name: adapter.path for name, adapter in self._registered.items()}

    def resolve(self, name: str) -> Adapter:
        """ValueError with a sentence."""
        if not self._num_slots:
            raise ValueError(_NOT_ENABLED)
        adapter = self._registered.get(name)
        if adapter is None:
            known = ", ".join(map(repr, self._registered)) or "none"
            raise ValueError(f"The LoRA adapter {name!r} is not loaded; loaded are: {known}.")
        return adapter

    def load_initial(self, paths: Sequence[str]) -> None:
        """Those of --lora-paths, and waits for them. ValueError with a sentence that names the one that is refused."""
        for text in paths:
            name, path = split_lora_path(text)
            try:
                for _ in self.load(name, path):
                    self.memory.tend()
                    time.sleep(_POLL_S)
            except (ControlError, CommandError) as error:
                raise ValueError(f"The LoRA adapter {name!r} of --lora-paths cannot be loaded: {error}") from error

    def load(self, name: str, path: str, pinned: bool = False) -> Generator[None, None, None]:
        """A name that is loaded from this very folder gets a new version. Raises ControlError, or CommandError if the runner
        refuses it; then all is as before."""
        self._check_load(name, path, pinned)
        adapter = Adapter(name=name, path=path, version=next(self._versions), is_pinned=pinned)
        adapter.load_place = (0, self._newest_arrival)  # behind all that are here
        self._loading[name] = adapter
        self.memory.want(adapter)
        while adapter.stamp is None and not adapter.problem:
            yield
        adapter.load_place = None
        del self._loading[name]
        if adapter.problem:
            raise CommandError(adapter.problem)
        if (old := self._registered.pop(name, None)) is not None:
            self.memory.retire(old)
        self._registered[name] = adapter

    def unload(self, name: str) -> Generator[None, None, None]:
        """No new request gets it from now on; done when the last one has ended and its memory is free. Raises ControlError."""
        adapter = self._registered.get(name)
        if adapter is None:
            raise ControlError(f"The LoRA adapter {name!r} is not loaded.")
        if adapter.is_pinned:
            raise ControlError(f"The LoRA adapter {name!r} is pinned, and stays loaded as long as the server runs.")
        self.memory.retire(self._registered.pop(name))
        while not self.memory.is_forgotten(adapter):
            yield

    def _check_load(self, name: str, path: str, pinned: bool) -> None:
        if not self._num_slots:
            raise ControlError(_NOT_ENABLED)
        if name in self._loading:
            raise ControlError(f"The LoRA adapter {name!r} is being loaded.")
        old = self._registered.get(name)
        if old is not None and old.path != path:
            raise ControlError(f"The LoRA adapter {name!r} is loaded already, from {old.path}; unload it first.")
        others = [one for one in (*self._registered.values(), *self._loading.values()) if one is not old]
        num_pinned = sum(one.is_pinned for one in others)
        if pinned and num_pinned >= self._most_pinned:
            raise ControlError(
                f"{num_pinned} LoRA adapters are pinned; at most {self._most_pinned} may be, so that others find one of the "
                f"{self._num_slots} slots (--max-loras-per-batch)."
            )

    # --- requests

    def join(self, req: Req) -> None:
        """A request that was taken in."""
        self._newest_arrival = req.arrival
        if req.adapter is not None:
            req.adapter.users[req] = None
            self.memory.want(req.adapter)

    def leave(self, req: Req) -> None:
        """It has ended."""
        if req.adapter is not None:
            del req.adapter.users[req]

    def may_run(self, req: Req) -> bool:
        adapter = req.adapter
        return adapter is None or (self._is_ready(req, adapter) and self.slots.may_use(req, adapter))

    def choose(self, waiting: Iterable[Req], most: int | None) -> list[Req]:
        """The first `most` that may run; asked before a step is filled. The first of those that find no slot claims one."""
        if not self._num_slots:
            return list(itertools.islice(waiting, most))
        self.slots.check_claim()
        found: list[Req] = []
        lacking: list[tuple[tuple[int, int], Req]] = []
        for req in waiting:
            if len(found) == most:
                break
            if self.may_run(req):
                found.append(req)
            elif req.adapter is not None and req.adapter.slot is None and self._is_ready(req, req.adapter):
                lacking.append(((-req.urgency, req.arrival), req))
        if lacking:
            self.slots.claim_for(min(lacking)[1])
        return found

    def _is_ready(self, req: Req, adapter: Adapter) -> bool:
        """As far as the host's memory goes."""
        return adapter.is_read and not self.memory.holds_back(req)

    @property
    def num_held_reqs(self) -> int:
        """Waiting requests that cannot be given a row now."""
        return sum(not self.may_run(req) for req in self._waiting) if self._num_slots else 0

    @property
    def num_changes(self) -> int:
        """Rises whenever somebody may run who could not before."""
        return self.memory.num_changes + self.slots.num_changes

    def counts(self) -> dict[str, Any]:
        """Nothing unless LoRA is enabled."""
        if not self._num_slots:
            return {}
        numbers = {
            "num_loaded": len(self._registered),
            "num_pinned": sum(adapter.is_pinned for adapter in self._registered.values()),
            "num_draining": self.memory.num_retired,
            "num_in_memory": len(self.memory),
            "num_on_device": len(self.slots),
            "num_held_reqs": self.num_held_reqs,
            "num_reads": self.memory.num_reads,
            "num_evictions": self.slots.num_evictions,
        }
        return {"lora": numbers}
