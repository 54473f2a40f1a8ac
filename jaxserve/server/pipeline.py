"""One running engine: the channels, the workers and the TokenizerManager, from start to end.

    start -> wait_ready -> (serve) -> drain -> close
                  \\-> WorkerDiedError at any time after start

Both front doors stand on it: `jaxserve.server.launch` adds HTTP and signals, `jaxserve.server.engine` a Python interface. All
methods run on one asyncio loop, on a thread that lives until `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from jaxserve.config import ServerArgs
from jaxserve.ipc import Channels
from jaxserve.messages import FRONT, SCHEDULER, WorkerAddress
from jaxserve.scheduler.control.unblock_input import UnblockInputReqInput
from jaxserve.server.decoder_handover import hand_over
from jaxserve.server.fronts.managers import MainManager
from jaxserve.server.probes import probe_replica
from jaxserve.server.requests import RequestError
from jaxserve.server.restarts import Restarts
from jaxserve.server.tokenizer_manager import TokenizerManager
from jaxserve.server.worker import Launchable, WorkerDiedError
from jaxserve.server.workers import WorkerGroup, between_processes, default_commands

logger = logging.getLogger(__name__)

# After an abort: how long the scheduler may take to send the terminal messages.
ABORT_GRACE_S = 10.0
# After a ShutdownReq: how long the workers may take to end.
EXIT_GRACE_S = 15.0
# After everything failed: how long fronts may take to tell their clients.
FRONT_GRACE_S = 8.0
_POLL_S = 0.02


class Pipeline:
    def __init__(
        self,
        args: ServerArgs,
        commands: Sequence[Launchable] | None = None,
        *,
        hide_torch: bool = False,
        open_channels: Callable[[ServerArgs], AbstractContextManager[Channels]] = between_processes,
    ) -> None:
        """`commands`: other workers than the default's processes, which `open_channels` may suit better. `hide_torch`: this
        process is all ours."""
        self.args = args
        self.workers = WorkerGroup(commands if commands is not None else default_commands(args))
        has_fronts = any(worker.kind == FRONT for worker in self.workers.addresses)
        make = MainManager if has_fronts else TokenizerManager
        self.manager = make(args, self.workers.addresses, self.workers.receive)
        self.death: WorkerDiedError | None = None  # of the worker that ended too early
        self._restarts = Restarts(self.workers, self.manager, is_on=args.restart_workers)
        self._hide_torch = hide_torch
        self._open_channels = open_channels
        self._open = contextlib.ExitStack()
        self._closing = threading.Lock()  # what is written into the folder is written before it is removed, or never
        self._is_closed = False
        self._channels: Channels | None = None
        self._info: dict[WorkerAddress, dict[str, Any]] = {}

    @property
    def folder(self) -> Path:
        """The private folder of this engine."""
        assert self._channels is not None, "start comes first"
        return self._channels.folder

    @property
    def worker_info(self) -> dict[str, dict[str, Any]]:
        """What each worker said about itself when it became ready, by its name."""
        return {str(worker): info for worker, info in self._info.items()}

    async def start(self, before_workers: Callable[[Path], None] = lambda folder: None) -> None:
        """Starts the workers; `before_workers` is given the private folder before it does. Raises ValueError for what a user
        can mend."""
        self._channels = self._open.enter_context(self._open_channels(self.args))
        self.manager.open(self._channels)
        before_workers(self.folder)
        self.workers.start(self._channels)

    async def wait_ready(self) -> None:
        """Returns when requests are taken. Raises WorkerDiedError or ValueError if that will never be."""
        started_s = time.monotonic()
        tokenizer = asyncio.create_task(asyncio.to_thread(self._load_tokenizer))
        workers = asyncio.create_task(self.workers.wait_ready())
        try:
            await asyncio.gather(tokenizer, workers)
        finally:
            workers.cancel()  # if the tokenizer failed; the thread that loads one cannot be stopped
        self._info = workers.result()
        self.manager.set_model({worker: info for worker, info in self._info.items() if worker.kind == SCHEDULER})
        if not self.args.skip_server_warmup:
            await self._warm_up()
        if self.manager.status == "starting":
            self.manager.status = "ready"
            took_s = time.monotonic() - started_s
            if self.manager.metrics is not None:
                self.manager.metrics.startup_s = took_s
            logger.info("Ready after %.1f s.", took_s)

    def _load_tokenizer(self) -> None:
        tokenizer = self.manager.load_tokenizer(hide_torch=self._hide_torch)
        with self._closing:
            if not self._is_closed:
                hand_over(tokenizer, self.folder)

    async def _warm_up(self) -> None:
        """One token through every process, before anybody is told that they work."""
        probe = asyncio.create_task(self._probe_all())
        death = asyncio.create_task(self.workers.watch())
        try:
            done, _ = await asyncio.wait({probe, death}, return_when=asyncio.FIRST_COMPLETED)
            if death in done:
                raise death.result()
            await probe
        except RequestError as error:
            raise WorkerDiedError(f"The warm-up request failed: {error.message}") from error
        finally:
            probe.cancel()
            death.cancel()

    async def _probe_all(self) -> None:
        num_replicas = self.args.dp_size
        probes = range(max(num_replicas, self.args.detokenizer_worker_num))  # which have detokenizers in turn, as any requests
        await asyncio.gather(*(probe_replica(self.manager, i % num_replicas, before_ready=True) for i in probes))

    async def watch(self) -> WorkerDiedError:
        """Returns when a worker has ended without which the server cannot go on: from then on every request gets an error."""
        while True:
            death = await self.workers.watch()
            self.manager.journal.dump_for_crash(str(death))
            if not self._restarts.survives(death):
                break
        self.death = death
        self.manager.fail(death.for_clients)
        return death

    def show_state(self, reason: str) -> None:
        """To the log: the stacks of the workers and what they run; to the crash dump, if there is one: the requests."""
        self.manager.log_live_requests(reason)
        self.workers.show_stacks()

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new requests, lets the running ones end, aborts them after `timeout_s`, and ends the workers.

        Returns whether all of them ended by themselves, without an error. Raises WorkerDiedError if one ended too early.
        """
        self.manager.status = "draining"
        await self.manager.others_told()
        on_their_way = self._restarts.close()
        await self.workers.kill(only=on_their_way)
        for worker in on_their_way:
            self.workers.bury(worker)
            self.manager.replica_lost(worker, "The server is shutting down.", restarts=False)
        finishing = asyncio.create_task(self._finish_requests(timeout_s))
        death = asyncio.create_task(self.watch())
        try:
            await asyncio.wait({finishing, death}, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                raise death.result()
            await finishing
        finally:
            finishing.cancel()
            death.cancel()
        self.manager.send_shutdown()
        return await self.workers.stop(EXIT_GRACE_S)

    async def _finish_requests(self, timeout_s: float) -> None:
        manager = self.manager
        if manager.is_paused:
            timeout_s = 0.0  # nothing would end by itself
        elif manager.is_input_blocked:
            with contextlib.suppress(RequestError):
                await manager.control(UnblockInputReqInput())
        if manager.num_live:
            logger.info("Waiting up to %g s for %d running requests.", timeout_s, manager.num_live)
        if await self._wait_until_idle(timeout_s):
            return
        logger.warning("Aborting %d requests that are still running after %g s.", manager.num_live, timeout_s)
        with contextlib.suppress(RequestError, TimeoutError):
            await asyncio.wait_for(manager.abort_all(), ABORT_GRACE_S)
        if not await self._wait_until_idle(ABORT_GRACE_S):
            logger.error("The scheduler did not abort %d requests within %g s.", manager.num_live, ABORT_GRACE_S)

    async def _wait_until_idle(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self.manager.num_live:
            if time.monotonic() >= deadline_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def close(self) -> None:
        """Ends whatever is left, and cleans up. Every waiting request gets an error."""
        self._restarts.close()
        if self.manager.status != "failed":
            self.manager.fail("The server was shut down.")
        fronts = [worker for worker in self.workers.alive if worker.kind == FRONT]
        if fronts:  # whose clients are to read why
            await self.manager.others_told(fronts)
            self.manager.send_fronts_shutdown()
            await self.workers.wait_exits(fronts, FRONT_GRACE_S)
        await self.workers.kill()
        self.manager.close()
        with self._closing:
            self._is_closed = True
            self._open.close()
