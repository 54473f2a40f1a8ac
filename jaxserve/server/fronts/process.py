"""A front process: HTTP and a FrontManager on one loop, for the connections that the main process gives it.

    connect to the main process (keys) -> HTTP (503) -> load the tokenizer -> ready -> ... -> ShutdownReq: flush, exit 0

It is a worker as the others are: it dies with the main process, and if it fails the server ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import socket
import sys

import uvloop

from jaxserve.config import ServerArgs
from jaxserve.messages import FRONT
from jaxserve.server.elsewhere import Place
from jaxserve.server.fronts.connections import connect, receive_connections
from jaxserve.server.fronts.managers import FrontManager
from jaxserve.server.garbage import importing, settle_garbage_collector
from jaxserve.server.worker_process import SHOW_STACKS, UserError, WorkerContext, run_worker

logger = logging.getLogger(__name__)


class _Front:
    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._rank = context.address.rank
        self._door, welcome = connect(context.folder)
        self._started_s = welcome.started_s
        self._args = welcome.with_keys(context.args)
        self._shutdown = asyncio.Event()
        self._adoptions: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Raises ValueError with a sentence for the user."""
        manager = FrontManager(self._args, self._rank, self._shutdown.set)
        manager.open(self._context.channels)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(SHOW_STACKS, manager.log_live_requests, SHOW_STACKS.name)
        faulthandler.register(SHOW_STACKS, all_threads=True, chain=True)  # which the loop's took the place of
        try:
            await self._serve(manager)
        finally:
            manager.close()
            self._door.close()

    async def _serve(self, manager: FrontManager) -> None:
        with importing():
            from jaxserve.server.http.uvicorn_server import make_http_server, unix_listener

        place = Place(self._rank, self._args.tokenizer_worker_num, self._context.folder, self._started_s)
        http = make_http_server(manager, _with_share(self._args), place=place)
        closed = manager.board.connection_closed

        def adopt(connection: socket.socket) -> None:
            task = asyncio.create_task(http.adopt(connection, closed))
            self._adoptions.add(task)
            task.add_done_callback(self._adoptions.discard)

        with unix_listener(place.socket_of(self._rank)) as own_door:
            serving = asyncio.create_task(http.serve(sockets=[own_door]))
            receive_connections(self._door, self._rank, adopt)
            try:
                await asyncio.to_thread(manager.load_tokenizer, hide_torch=True)
                manager.say_ready()
                settle_garbage_collector()
                await self._shutdown.wait()
            finally:
                http.should_exit = True
                await serving


def _with_share(args: ServerArgs) -> ServerArgs:
    """With this front's part of the connections that the server may have."""
    if args.limit_concurrency is None:
        return args
    return args.replace(limit_concurrency=-(-args.limit_concurrency // args.tokenizer_worker_num))


def work(context: WorkerContext) -> None:
    try:
        uvloop.run(_Front(context).run())
    except ValueError as error:
        raise UserError(str(error)) from error


if __name__ == "__main__":
    sys.exit(run_worker(FRONT, work))
