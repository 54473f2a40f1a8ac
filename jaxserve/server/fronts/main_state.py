"""MainState: what holds for a whole server, as the main process knows it, and how its fronts learn of it.

    main process: StateTeller ──MainState──► front: FrontManager ──MainStateTaken──► StateTeller

Changes that come about by themselves are noticed by looking, so that whoever makes one need not know of fronts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxserve.messages import (
    BatchStrOut,
    ControlRequest,
    Message,
    ProfileBegan,
    ProfileEnded,
    ShutdownReq,
    TokenizerInput,
    WorkerAddress,
)
from jaxserve.scheduler.control.update_weights_from_disk import ServedWeights

logger = logging.getLogger(__name__)

# How late fronts may learn of what changes by itself. Whoever changes something by a control request waits until they know.
_TELL_EVERY_S = 0.05
# A front that does not take it in for so long is stuck; the others, and whoever asked, go on.
_PATIENCE_S = 10.0


class ReplicaFacts(msgspec.Struct, array_like=True):
    """Of one rank."""

    state: str  # joining, up or down
    worker: WorkerAddress | None = None  # its process; None: there is none
    cache_tokens: int = 0
    loss: str = ""  # why the last process with this rank is gone, for its clients


class MainState(Message):
    status: str
    failure: str
    is_paused: bool
    is_input_blocked: bool
    released_memory: tuple[str, ...]
    weights: ServedWeights
    lora_adapters: dict[str, str]
    replicas: list[ReplicaFacts]
    model: dict[str, Any] | None = None  # what the schedulers said of it; None: none is loaded yet
    max_total_tokens: int = 0
    max_queued: int | None = None
    num_programs_missing: int = 0
    num_cache_losses: int = 0  # times that all replicas lost what they had cached
    number: int = 0  # of the change


class MainStateTaken(Message):
    """The front goes by it."""

    front: WorkerAddress
    number: int


class PromptDispatched(Message):
    """Another front sent a replica a prompt, which is cached there from now on."""

    rank: int
    hashes: np.ndarray  # uint64, see `jaxserve.data_parallel.prompt`


FrontInput = BatchStrOut | ControlRequest | MainState | PromptDispatched | ProfileBegan | ProfileEnded | ShutdownReq
# Of the main process, if it has fronts.
MainInput = TokenizerInput | MainStateTaken | PromptDispatched


class StateTeller:
    """The main process's side."""

    def __init__(
        self, fronts: Sequence[WorkerAddress], now: Callable[[], MainState], send: Callable[[WorkerAddress, Message], None]
    ) -> None:
        """`now`: the state as it is, with the number 0."""
        self._now = now
        self._send = send
        self._taken = dict.fromkeys(fronts, 0)
        self._last: MainState | None = None
        self._number = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """On the running loop."""
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                self._tell_changes()
            except Exception:
                logger.exception("The fronts could not be told of the server's state.")
            await asyncio.sleep(_TELL_EVERY_S)

    def _tell_changes(self) -> None:
        state = self._now()
        if state == self._last:
            return
        self._last, self._number = state, self._number + 1
        message = msgspec.structs.replace(state, number=self._number)
        for front in self._taken:
            self._send(front, message)

    async def told(self, fronts: Sequence[WorkerAddress], patience_s: float = _PATIENCE_S) -> None:
        """Returns when these fronts go by what holds now."""
        self._tell_changes()
        number = self._number
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while any(self._taken[front] < number for front in fronts):
                    self._changed.clear()
                    await self._changed.wait()

    def taken(self, message: MainStateTaken) -> None:
        self._taken[message.front] = max(self._taken[message.front], message.number)
        self._changed.set()
