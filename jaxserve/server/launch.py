"""`jaxserve serve`: the HTTP server around a pipeline, with signals and an exit status.

    bind the port -> start the workers -> answer HTTP (503) -> ready -> ... -> SIGTERM: drain -> exit 0
                                                                       `----> a worker died: its reason, exit 1

The port is bound before anything is started, so that a port in use costs no model load. HTTP answers from the beginning:
/health says 503 until the warm-up request has come back.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import logging
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from jaxserve.config import ServerArgs
from jaxserve.progress import terminal_columns
from jaxserve.server.elsewhere import http_socket
from jaxserve.server.following import serve_following
from jaxserve.server.fronts.connections import ConnectionGiver, Welcome
from jaxserve.server.fronts.managers import MainManager
from jaxserve.server.garbage import importing, settle_garbage_collector
from jaxserve.server.http.keys import with_keys
from jaxserve.server.located import located
from jaxserve.server.logs import configure_logging, log_lines
from jaxserve.server.pipeline import Pipeline
from jaxserve.server.process_worker import WorkerCommand
from jaxserve.server.worker import WorkerDiedError
from jaxserve.server.worker_process import SHOW_STACKS
from jaxserve.server.workers import default_commands, front_commands

logger = logging.getLogger(__name__)

_BACKLOG = 2048


def launch_server(args: ServerArgs, commands: Sequence[WorkerCommand] | None = None) -> int:
    """Serves until a signal or a failure; returns the exit status. Call it from the main thread."""
    configure_logging(args.log_level)
    if args.node_rank:
        return _follow(args)
    try:
        args = with_keys(args, os.environ)
        listener = bind(args.host, args.port)
    except (ValueError, OSError) as error:
        log_lines(logger, logging.ERROR, str(error))
        return 1
    with listener:
        try:
            args = located(args)
            server = _Server(args, listener, commands)
        except ValueError as error:
            log_lines(logger, logging.ERROR, str(error))
            return 1
        except KeyboardInterrupt:  # while a model is fetched
            return 130
        try:
            return uvloop.run(server.run())
        except KeyboardInterrupt:  # in the moment before our handlers stand
            return 130


def _follow(args: ServerArgs) -> int:
    try:
        return serve_following(located(args))
    except (ValueError, OSError) as error:
        log_lines(logger, logging.ERROR, str(error))
        return 1


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError with a sentence naming host and port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise OSError(f"Cannot listen on {host}:{port}: {error.strerror}.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        hint = " Is another server running? Choose another --port." if error.errno == errno.EADDRINUSE else ""
        raise OSError(f"Cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}.{hint}") from error
    return listener


class _Server:
    def __init__(self, args: ServerArgs, listener: socket.socket, commands: Sequence[WorkerCommand] | None) -> None:
        self._args = args
        self._listener = listener
        if commands is None:
            commands = default_commands(args)
        fronts = front_commands(args)
        self._pipeline = Pipeline(args, (*commands, *fronts), hide_torch=True)
        # None: connections are served here.
        self._giver = ConnectionGiver(listener, Welcome.of(args)) if fronts else None
        self._stop = asyncio.Event()  # the first signal
        self._hurry = asyncio.Event()  # the second
        self._signal = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(SHOW_STACKS, self._pipeline.show_state, SHOW_STACKS.name)
        # Our own stacks come at once, also if the loop hangs; then it is the loop's turn.
        faulthandler.register(SHOW_STACKS, all_threads=True, chain=True)
        try:
            await self._pipeline.start(self._open_giver)
            # Here and not above: importing FastAPI takes a second that the workers need not wait for.
            with importing():
                from jaxserve.server.http.uvicorn_server import make_http_server, unix_listener

            http = make_http_server(self._pipeline.manager, self._args)
            if self._giver is not None:  # what concerns the whole server is asked for by the fronts
                listener = unix_listener(http_socket(self._pipeline.folder, None))
            else:
                listener = self._listener
        except (ValueError, OSError) as error:
            log_lines(logger, logging.ERROR, str(error))
            await self._pipeline.close()
            return 1
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        logger.info("Listening on %s", self._url(*self._listener.getsockname()[:2]))
        try:
            return await self._serve()
        except (WorkerDiedError, ValueError) as error:
            log_lines(logger, logging.ERROR, str(error))
            return 1
        finally:
            if self._giver is not None:
                self._giver.close()
            await self._pipeline.close()
            http.should_exit = True
            await serving

    def _open_giver(self, folder: Path) -> None:
        manager = self._pipeline.manager
        if self._giver is not None and isinstance(manager, MainManager):
            self._giver.open(folder, manager.board)

    async def _serve(self) -> int:
        """Until a signal or a failure. Raises WorkerDiedError, or ValueError for what the user can mend."""
        stop = asyncio.create_task(self._stop.wait())
        ready = asyncio.create_task(self._pipeline.wait_ready())
        try:
            await asyncio.wait({stop, ready}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                logger.info("%s while starting: ending now.", self._signal_name)
                return 0
            await ready
            if terminal_columns() and not self._args.skip_tokenizer_init and self._pipeline.manager.limits.generates:
                self._say_how_to_try_it()
            settle_garbage_collector(collect_first=False)  # it would take a tenth of a second, and requests come now
            return await self._serve_until_stop(stop)
        finally:
            stop.cancel()
            ready.cancel()

    async def _serve_until_stop(self, stop: asyncio.Task[Any]) -> int:
        death = asyncio.create_task(self._pipeline.watch())
        try:
            await asyncio.wait({stop, death}, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                raise death.result()
        finally:
            death.cancel()
        logger.info("%s: taking no new requests; ending when the running ones have ended.", self._signal_name)
        draining = asyncio.create_task(self._pipeline.drain(self._args.shutdown_timeout_s))
        hurry = asyncio.create_task(self._hurry.wait())
        try:
            await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
            if hurry.done() and not draining.done():
                logger.warning("%s again: ending now.", self._signal_name)
                return 128 + self._signal
            return 0 if await draining else 1
        finally:
            draining.cancel()
            hurry.cancel()

    def _url(self, host: str, port: int) -> str:
        scheme = "https" if self._args.ssl_certfile else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def _say_how_to_try_it(self) -> None:
        host, port = self._listener.getsockname()[:2]
        url = self._url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
        key = " --api-key ..." if self._args.api_key else ""
        logger.info("Try it in another terminal: jaxserve chat --url %s%s   The API: %s/docs", url, key, url)

    @property
    def _signal_name(self) -> str:
        return signal.Signals(self._signal).name

    def _on_signal(self, number: int) -> None:
        self._signal = number
        (self._hurry if self._stop.is_set() else self._stop).set()
