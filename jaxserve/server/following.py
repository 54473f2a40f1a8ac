"""A host that follows: its main process starts the worker that does as host 0 says, and ends with it.

No HTTP, no tokenizer: whoever wants something asks host 0. A first signal is not for this process to act on: where a cluster
tells all hosts to end, host 0 lets its requests end first, for which it needs the others.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading

import uvloop

from jaxserve.config import ServerArgs
from jaxserve.ipc import Inbox
from jaxserve.messages import HOST, TOKENIZER, WorkerAddress, WorkerFailed, WorkerReady
from jaxserve.server.logs import configure_logging, log_lines
from jaxserve.server.process_worker import WorkerCommand
from jaxserve.server.worker import WorkerDiedError
from jaxserve.server.worker_process import SHOW_STACKS
from jaxserve.server.workers import WorkerGroup, between_processes

logger = logging.getLogger(__name__)

_POLL_S = 0.1


def serve_following(args: ServerArgs) -> int:
    """Until host 0 ends; returns the exit status. `args` are `located`. Call it from the main thread."""
    configure_logging(args.log_level)
    try:
        death = uvloop.run(Following(args).run())
    except KeyboardInterrupt:  # in the moment before our handlers stand
        return 130
    if death is None:
        logger.info("Host 0 has ended.")
        return 0
    log_lines(logger, logging.ERROR, str(death))
    return 1


class Following:
    def __init__(self, args: ServerArgs) -> None:
        self._args = args
        self._workers = WorkerGroup([WorkerCommand.of_module(HOST, "jaxserve.server.host_process", args.node_rank)])
        self._hurry = asyncio.Event()
        self._signal = 0

    async def run(self) -> WorkerDiedError | None:
        """Returns when host 0 has ended, or with the reason why this host cannot go on."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal, number)
            loop.add_signal_handler(SHOW_STACKS, self._workers.show_stacks)
        with between_processes(self._args) as channels:
            inbox = channels.inbox(WorkerAddress(TOKENIZER), WorkerReady | WorkerFailed)
            reading = asyncio.create_task(self._read(inbox))
            try:
                self._workers.start(channels)
                return await self._until_the_end()
            finally:
                await self._workers.kill()
                reading.cancel()
                inbox.close()

    async def _until_the_end(self) -> WorkerDiedError | None:
        ready = asyncio.create_task(self._workers.wait_ready())
        death, hurry = asyncio.create_task(self._workers.watch()), asyncio.create_task(self._hurry.wait())
        try:
            await asyncio.wait({ready, death, hurry}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and not ready.exception():
                logger.info("Host %d is ready, and does as host 0 says.", self._args.node_rank)
                await asyncio.wait({death, hurry}, return_when=asyncio.FIRST_COMPLETED)
            if hurry.done() and not death.done():
                return WorkerDiedError(f"{signal.Signals(self._signal).name} again: ending now, and all hosts with this one.")
            found = await death
            return None if found.status == 0 else found
        finally:
            for task in (ready, death, hurry):
                task.cancel()

    async def _read(self, inbox: Inbox) -> None:
        while True:
            for message in inbox.receive():
                self._workers.receive(message)
            await asyncio.sleep(_POLL_S)

    def _on_signal(self, number: int) -> None:
        if self._signal:
            self._hurry.set()
        else:
            logger.info("%s: ending when host 0 does. Again: now.", signal.Signals(number).name)
        self._signal = number
