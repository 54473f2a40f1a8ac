"""The TokenizerManagers of a server with fronts: the main process's, which all that there is one of belongs to, and a front's.

A front serves whoever its connections bring. It takes over the main process's state as it is told, answers control requests
of the main process, and leaves to it what its clients ask of the whole server (AnsweredElsewhere).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np

from jaxserve.config import ServerArgs
from jaxserve.data_parallel import Prompt
from jaxserve.ipc import Channels
from jaxserve.messages import (
    FRONT,
    SCHEDULER,
    TOKENIZER,
    ControlRequest,
    Message,
    ProfileBegan,
    ProfileEnded,
    ShutdownReq,
    WorkerAddress,
    WorkerFailed,
    WorkerReady,
)
from jaxserve.metrics import Snapshot
from jaxserve.scheduler.control.declaration import ControlStruct
from jaxserve.scheduler.control.desk import ControlDesk
from jaxserve.scheduler.control.get_recent_requests import GetRecentRequestsReq
from jaxserve.server.elsewhere import AnsweredElsewhere
from jaxserve.server.fronts.board import Board
from jaxserve.server.fronts.main_state import (
    FrontInput,
    MainInput,
    MainState,
    MainStateTaken,
    PromptDispatched,
    ReplicaFacts,
    StateTeller,
)
from jaxserve.server.fronts.shared import Shared
from jaxserve.server.host_spans import next_in_chain
from jaxserve.server.output_routes import fronts_of
from jaxserve.server.requests import GenerateReqInput
from jaxserve.server.sinks import ChunkSink
from jaxserve.server.tokenizer_manager import TokenizerManager
from jaxserve.timeline import RequestTimeline

MAIN = WorkerAddress(TOKENIZER)


class _OneOfSeveral(TokenizerManager):
    """They tell each other which replica got which prompt."""

    _others: Sequence[WorkerAddress]

    @property
    def board(self) -> Board:
        assert self._shared is not None
        return self._shared.board

    def _handlers(self) -> dict[type[Message], Callable[[Any], None]]:
        return {**super()._handlers(), PromptDispatched: self._take_in_dispatched}

    def _prompt_dispatched(self, rank: int, prompt: Prompt) -> None:
        message = PromptDispatched(rank=rank, hashes=np.array(prompt.hashes, np.uint64))
        for other in self._others:
            self._link.send(other, message)

    def _take_in_dispatched(self, message: PromptDispatched) -> None:
        self.replicas.controller.others_dispatched(message.rank, Prompt.of_hashes(message.hashes))


class MainManager(_OneOfSeveral):
    def __init__(
        self,
        args: ServerArgs,
        workers: Sequence[WorkerAddress],
        on_worker_event: Callable[[WorkerReady | WorkerFailed], None],
    ) -> None:
        self._others = [worker for worker in workers if worker.kind == FRONT]
        self._losses: dict[int, str] = {}  # by rank, why its last process is gone
        self._num_cache_losses = 0
        shared = Shared(None, len(self._others), args.dp_size)
        super().__init__(args, workers, on_worker_event, receives=MainInput, shared=shared)
        self._teller = StateTeller(self._others, self._state, self._link.send)

    def _handlers(self) -> dict[type[Message], Callable[[Any], None]]:
        return {**super()._handlers(), MainStateTaken: lambda message: self._teller.taken(message)}

    def open(self, channels: Channels) -> None:
        super().open(channels)
        self._teller.start()

    def close(self) -> None:
        self._teller.close()
        super().close()

    def _state(self) -> MainState:
        limits = self._limits
        return MainState(
            status=self.status,
            failure=self.failure,
            is_paused=self.is_paused,
            is_input_blocked=self.is_input_blocked,
            released_memory=tuple(self.released_memory),
            weights=self.weights,
            lora_adapters=dict(self.lora_adapters),
            replicas=[
                ReplicaFacts(
                    replica.state.value,
                    self.replicas.process(rank),
                    self.replicas.cache_tokens(rank),
                    self._losses.get(rank, ""),
                )
                for rank, replica in enumerate(self.replicas.controller.replicas)
            ],
            model=self._model,
            max_total_tokens=0 if limits is None else limits.max_total_tokens,
            max_queued=None if limits is None else limits.max_queued,
            num_programs_missing=self.num_programs_missing,
            num_cache_losses=self._num_cache_losses,
        )

    async def others_told(self, fronts: Sequence[WorkerAddress] | None = None) -> None:
        await self._teller.told(self._others if fronts is None else fronts)

    def send_fronts_shutdown(self) -> None:
        for front in self._others:
            self._link.send(front, ShutdownReq())

    async def control(self, request: ControlStruct) -> list[Any]:
        """As the base's. Whoever asks next, whichever process that reaches, finds it done."""
        replies = await super().control(request)
        await self.others_told()
        return replies

    def replica_lost(self, worker: WorkerAddress, reason: str, *, restarts: bool) -> None:
        self._losses[worker.rank] = reason
        super().replica_lost(worker, reason, restarts=restarts)

    async def replica_back(self, worker: WorkerAddress, info: dict[str, Any]) -> None:
        await super().replica_back(worker, info)
        await self.others_told()

    def forget_caches(self) -> None:
        super().forget_caches()
        self._num_cache_losses += 1

    async def recent_requests(self) -> list[RequestTimeline]:
        of_fronts = await self._controls.ask(GetRecentRequestsReq())
        return [*self.own_recent_requests(), *(line for reply in of_fronts for line in reply.timelines)]


class FrontManager(_OneOfSeveral):
    def __init__(self, args: ServerArgs, front: int, on_shutdown: Callable[[], None]) -> None:
        self._on_shutdown = on_shutdown
        self._address = WorkerAddress(FRONT, front)
        self._others = [other for other in (MAIN, *fronts_of(args)) if other != self._address]
        schedulers = [WorkerAddress(SCHEDULER, rank) for rank in range(args.dp_size)]
        self._main: MainState | None = None
        super().__init__(
            args,
            [*schedulers, *self._others],
            lambda event: None,
            own=self._address,
            receives=FrontInput,
            shared=Shared(front, args.tokenizer_worker_num, args.dp_size),
        )
        self._desk = ControlDesk(self, self._address, functools.partial(self._link.send, MAIN))

    def _handlers(self) -> dict[type[Message], Callable[[Any], None]]:
        return {
            **super()._handlers(),
            MainState: self._take_over,
            ControlRequest: lambda message: self._desk.receive(message),
            ProfileBegan: self._pass_on_began,
            ProfileEnded: self._pass_on_ended,
            ShutdownReq: lambda message: self._on_shutdown(),
        }

    def _pass_on_began(self, message: ProfileBegan) -> None:
        self._spans.begin(message)
        self._link.send(next_in_chain(self._address, self.args), message)

    def _pass_on_ended(self, message: ProfileEnded) -> None:
        message.spans[str(self._address)] = self._spans.end(message)
        self._link.send(next_in_chain(self._address, self.args), message)

    def say_ready(self) -> None:
        self._link.send(MAIN, WorkerReady(worker=self._address))

    # --- the main process's state

    def _take_over(self, state: MainState) -> None:
        known, self._main = self._main, state
        self.is_paused, self.is_input_blocked = state.is_paused, state.is_input_blocked
        self.released_memory, self.weights = state.released_memory, state.weights
        self.lora_adapters = state.lora_adapters
        if state.model is not None and self._limits is None:
            self._set_limits(state.model)
        for rank, facts in enumerate(state.replicas):
            self._take_over_replica(rank, facts)
        if self._limits is not None:
            self._limits = dataclasses.replace(
                self._limits, max_total_tokens=state.max_total_tokens, max_queued=state.max_queued
            )
        if known is not None and state.num_cache_losses != known.num_cache_losses:
            self.forget_caches()
        if state.status == "failed" and self.status != "failed":
            self.journal.dump_for_crash(state.failure)
            self.fail(state.failure)
        self.status = state.status  # type: ignore[assignment]
        self._share()
        self._link.send(MAIN, MainStateTaken(front=self._address, number=state.number))

    def _take_over_replica(self, rank: int, facts: ReplicaFacts) -> None:
        known = self.replicas.process(rank)
        if known is not None and known != facts.worker:
            self.replica_lost(known, facts.loss, restarts=False)
            known = None
        if facts.worker is None:
            return
        if known is None:
            self.replicas.joins(facts.worker)
        if facts.state == "up" and self.replica_states[rank] != "up":
            self.replicas.serves(facts.worker, facts.cache_tokens)

    @property
    def num_programs_missing(self) -> int:
        return 0 if self._main is None else self._main.num_programs_missing

    # --- requests

    @contextlib.asynccontextmanager
    async def _counted(self, stream: AbstractAsyncContextManager[None]) -> AsyncIterator[None]:
        try:
            async with stream:
                self._share()
                yield
        finally:
            self._share()

    def stream(
        self, req: GenerateReqInput, sink: ChunkSink, *, before_ready: bool = False
    ) -> AbstractAsyncContextManager[None]:
        if any(options.session_params is not None for options in req.options):
            raise AnsweredElsewhere(None)  # which has the sessions
        return self._counted(super().stream(req, sink, before_ready=before_ready))

    async def health_check(self, timeout_s: float) -> bool:
        if self.is_paused or self.is_input_blocked:
            raise AnsweredElsewhere(None)  # which asks the schedulers for their state
        return await super().health_check(timeout_s)

    # --- what only the main process can answer

    async def control(self, request: ControlStruct) -> list[Any]:
        raise AnsweredElsewhere(None)

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        raise AnsweredElsewhere(None)

    # --- what it answers the main process

    def metrics_snapshot(self) -> Snapshot:
        assert self.metrics is not None, "nobody asks a server without metrics"
        return self.metrics.snapshot(FRONT, {})

    async def recent_requests(self) -> list[RequestTimeline]:
        raise AnsweredElsewhere(None)
