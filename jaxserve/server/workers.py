"""The workers of one engine: starting them, waiting until they are ready, and noticing when one ends.

The group knows nothing of requests; `jaxserve.server.pipeline` says when to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jaxserve.config import ServerArgs
from jaxserve.ipc import Channels, SocketChannels, private_folder
from jaxserve.messages import DETOKENIZER, FRONT, SCHEDULER, WorkerAddress, WorkerFailed, WorkerReady
from jaxserve.server.logs import log_lines
from jaxserve.server.output_routes import fronts_of
from jaxserve.server.process_worker import WorkerCommand
from jaxserve.server.replica_devices import replica_environment
from jaxserve.server.worker import Launchable, Worker, WorkerDiedError
from jaxserve.server.worker_process import write_args

logger = logging.getLogger(__name__)

# After a worker ended: how long its last words may take to arrive by their channel.
_LAST_WORDS_S = 0.3
# After it was killed: how long it may take to be gone.
_KILL_GRACE_S = 20.0


@contextlib.contextmanager
def between_processes(args: ServerArgs) -> Iterator[Channels]:
    """Channels of an engine whose workers are processes, which find the options in its folder. ValueError with a sentence."""
    with private_folder() as paths:
        write_args(paths.folder, args)
        channels = SocketChannels(paths)
        try:
            yield channels
        finally:
            channels.close()


def default_commands(args: ServerArgs) -> tuple[WorkerCommand, ...]:
    """Raises ValueError if the devices there are cannot be divided among the replicas."""
    scheduler = WorkerCommand.of_module(SCHEDULER, "jaxserve.server.scheduler_process")
    return (
        *(
            dataclasses.replace(scheduler, rank=rank, env=replica_environment(args, rank, os.environ))
            for rank in range(args.dp_size)
        ),
        *(
            WorkerCommand.of_module(DETOKENIZER, "jaxserve.server.detokenizer", rank)
            for rank in range(args.detokenizer_worker_num)
        ),
    )


def front_commands(args: ServerArgs) -> tuple[WorkerCommand, ...]:
    """None if the main process is the only one with HTTP."""
    return tuple(WorkerCommand.of_module(FRONT, "jaxserve.server.fronts.process", front.rank) for front in fronts_of(args))


class WorkerGroup:
    """All workers of one engine. Lives on one asyncio loop."""

    def __init__(self, commands: Sequence[Launchable]) -> None:
        self._commands = {command.address: command for command in commands}
        self._channels: Channels | None = None
        self._workers: dict[WorkerAddress, Worker] = {}
        self._exits: dict[WorkerAddress, asyncio.Event] = {}
        self._ready: dict[WorkerAddress, WorkerReady] = {}
        self._changed = asyncio.Event()  # a worker became ready, spoke its last words, or ended

    def start(self, channels: Channels) -> None:
        """Starts them all, on a thread that must outlive them."""
        self._channels = channels
        for command in self._commands.values():
            self._start(command)

    def start_again(self, worker: WorkerAddress) -> WorkerAddress:
        """One in place of one that has ended; on the thread that `start` was called on. Returns its address."""
        command = self._commands.pop(worker).again()
        self._commands[command.address] = command
        self._start(command)
        return command.address

    def _start(self, command: Launchable) -> None:
        assert self._channels is not None, "start comes first"
        worker, exited = command.launch(self._channels), asyncio.Event()
        self._workers[command.address], self._exits[command.address] = worker, exited

        def note_exit() -> None:
            exited.set()
            self._changed.set()

        worker.notify_exit(asyncio.get_running_loop(), note_exit)

    def bury(self, worker: WorkerAddress) -> None:
        """One that has ended, and whose end is dealt with."""
        del self._workers[worker], self._exits[worker]
        self._ready.pop(worker, None)

    @property
    def addresses(self) -> list[WorkerAddress]:
        return list(self._commands)

    @property
    def alive(self) -> list[WorkerAddress]:
        return [address for address, exited in self._exits.items() if not exited.is_set()]

    def pids(self) -> dict[WorkerAddress, int]:
        return {address: worker.pid for address, worker in self._workers.items()}

    def receive(self, event: WorkerReady | WorkerFailed) -> None:
        """A worker's message about itself."""
        if event.worker not in self._workers:
            logger.error("%s from an unknown worker %s.", type(event).__name__, event.worker)
            return
        if isinstance(event, WorkerReady):
            self._ready[event.worker] = event
        else:
            self._workers[event.worker].last_words = event
        self._changed.set()

    async def wait_ready(self, worker: WorkerAddress | None = None) -> dict[WorkerAddress, dict[str, Any]]:
        """What each worker, or this one, said when it became ready. Raises WorkerDiedError if one ends first."""
        wanted = self.addresses if worker is None else [worker]
        while not all(address in self._ready for address in wanted):
            if any(self._exits[address].is_set() for address in wanted):
                raise await self._obituary(wanted)
            await self._change()
        return {address: self._ready[address].info for address in wanted}

    async def watch(self) -> WorkerDiedError:
        """Returns when a worker has ended, with its reason. Of several, the one that spoke."""
        while len(self.alive) == len(self._exits):
            await self._change()
        return await self._obituary(list(self._exits))

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _obituary(self, addresses: Sequence[WorkerAddress]) -> WorkerDiedError:
        await self._wait_for_last_words()
        ended = [self._workers[address] for address in addresses if self._exits[address].is_set()]
        return next((worker for worker in ended if worker.last_words), ended[0]).obituary()

    async def _wait_for_last_words(self) -> None:
        """They come by another way than the exit and may be later."""
        deadline_s = asyncio.get_running_loop().time() + _LAST_WORDS_S
        while asyncio.get_running_loop().time() < deadline_s:
            if any(self._workers[address].last_words for address, event in self._exits.items() if event.is_set()):
                return
            await asyncio.sleep(0.01)

    async def wait_exits(self, workers: Collection[WorkerAddress], timeout_s: float) -> None:
        """Returns when they have ended by themselves, or the time is over."""
        waits = [asyncio.create_task(self._exits[worker].wait()) for worker in workers]
        if waits:
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for task in late:
                task.cancel()

    async def stop(self, timeout_s: float) -> bool:
        """Waits for all to end by themselves and kills the rest after `timeout_s`. Returns whether all ended with status 0."""
        await self.wait_exits(list(self._exits), timeout_s)
        await self.kill(f"did not end within {timeout_s:g} s")
        failed = [worker for worker in self._workers.values() if worker.status]
        for worker in failed:
            log_lines(logger, logging.ERROR, str(worker.obituary()))
        return not failed

    def show_stacks(self) -> None:
        """Asks all for the stacks of their threads, on stderr."""
        for worker in self._workers.values():
            if worker.status is None:
                worker.show_stacks()

    async def kill(self, reason: str | None = None, only: Collection[WorkerAddress] | None = None) -> None:
        """Ends what still runs, at once; returns when all, or only these, are gone."""
        chosen = [address for address in self._workers if only is None or address in only]
        for worker in map(self._workers.__getitem__, chosen):
            if worker.status is None:
                if reason:
                    logger.error("The %s %s; killing it.", worker.address, reason)
                worker.kill()
        exits = [asyncio.create_task(self._exits[address].wait()) for address in chosen]
        if exits:
            _, stuck = await asyncio.wait(exits, timeout=_KILL_GRACE_S)
            for task in stuck:  # in the kernel, or a thread in XLA, such as in a driver call that does not return
                task.cancel()
                logger.error("A killed worker is still there after %g s.", _KILL_GRACE_S)
