"""uvicorn around the app: how it is configured, how it listens, and without its own idea of signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from jaxserve.config import ServerArgs
from jaxserve.server.elsewhere import Place
from jaxserve.server.http.app import create_app
from jaxserve.server.http.connection_limits import Admission, ConnectionLimits
from jaxserve.server.http.service import GenerationService
from jaxserve.server.http.tls import CertificateRefresher
from jaxserve.server.http.wire import StreamingProtocol

# How long connections may take to read the last bytes of their replies when the server ends.
FLUSH_S = 5
_KEEP_ALIVE_S = 30
_TLS_SHUTDOWN_S = 5
# The limit on open files is raised to this where the system allows it.
_WANTED_FILES = 65_536
# Files the engine may open beside those it has when the server begins to listen.
_RESERVED_FILES = 64
_FEWEST_CONNECTIONS = 16
_ACCESS_LOG = "uvicorn.access"


class HttpServer(uvicorn.Server):
    """Leaves signals alone: they are about the whole server, and `jaxserve.server.launch` handles them."""

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits, refresher: CertificateRefresher | None = None) -> None:
        super().__init__(config)
        self.admission = Admission(limits)
        self._refresher = refresher

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        refreshing = None if self._refresher is None else asyncio.create_task(self._refresher.run())
        try:
            await super().serve(sockets)
        finally:
            if refreshing is not None:
                refreshing.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with limits for each connection, the TLS handshake included."""
        loop, backlog = asyncio.get_running_loop(), self.config.backlog
        self.servers = []
        for one in sockets or []:
            if one.family == socket.AF_UNIX:  # for other processes of this server
                self.servers.append(await loop.create_unix_server(self._new_protocol, sock=one, backlog=backlog))
            else:
                self.servers.append(await loop.create_server(self._new_protocol, sock=one, backlog=backlog, **self._tls()))
        self.started = True

    async def adopt(self, connection: socket.socket, ended: Callable[[], None]) -> None:
        """Serves a connection that somebody else accepted; `ended` is called once, when it is over."""
        loop = asyncio.get_running_loop()
        protocol = self._new_protocol(ended)
        try:
            await loop.connect_accepted_socket(lambda: protocol, connection, **self._tls())
        except (OSError, TimeoutError):  # it was gone already, or did not speak TLS
            connection.close()
            protocol.end_once()

    def _tls(self) -> dict[str, Any]:
        if self.config.ssl is None:
            return {}
        return {
            "ssl": self.config.ssl,
            "ssl_handshake_timeout": self.admission.limits.head_timeout_s,
            "ssl_shutdown_timeout": _TLS_SHUTDOWN_S,
        }

    def _new_protocol(self, ended: Callable[[], None] | None = None) -> StreamingProtocol:
        return StreamingProtocol(self.admission, ended=ended, config=self.config, server_state=self.server_state, app_state={})


def make_http_server(
    service: GenerationService, args: ServerArgs, limits: ConnectionLimits | None = None, place: Place | None = None
) -> HttpServer:
    """`place`: of a front process. Raises ValueError with a sentence if the TLS files cannot be used."""
    config = uvicorn.Config(
        create_app(service, args, place),
        log_config=None,
        log_level=args.log_level_http or "warning",
        access_log=args.log_level_http in ("debug", "info"),
        loop="none",
        http=StreamingProtocol,
        ws="none",
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=FLUSH_S,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_keyfile_password=args.ssl_keyfile_password,
        server_header=False,
    )
    try:
        config.load()
    except OSError as error:  # also every ssl.SSLError
        raise ValueError(
            f"--ssl-certfile {args.ssl_certfile!r} and --ssl-keyfile {args.ssl_keyfile!r} cannot be used: {error}"
        ) from error
    if limits is None:
        limits = ConnectionLimits(max_connections(args.limit_concurrency), stall_timeout_s=args.stream_stall_timeout_s)
    if args.uvicorn_access_log_exclude_prefixes:
        logging.getLogger(_ACCESS_LOG).addFilter(_Without(args.uvicorn_access_log_exclude_prefixes))
    refresher = CertificateRefresher(config.ssl, args) if args.enable_ssl_refresh and config.ssl is not None else None
    return HttpServer(config, limits, refresher)


class _Without(logging.Filter):
    """Of lines of the access log, whose third value is the path."""

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        super().__init__()
        self._prefixes = prefixes

    def filter(self, record: logging.LogRecord) -> bool:
        values = record.args
        return not (isinstance(values, tuple) and len(values) > 2 and str(values[2]).startswith(self._prefixes))


def unix_listener(path: Path) -> socket.socket:
    """Where the server's other processes ask."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.setblocking(False)
    return listener


def max_connections(wanted: int | None) -> int:
    """As many as wanted, and as the limit on open files allows after it was raised as far as that may be."""
    num_open = len(os.listdir("/dev/fd"))
    fitting = max(_raised_file_limit() - num_open - _RESERVED_FILES, _FEWEST_CONNECTIONS)
    return fitting if wanted is None else min(wanted, fitting)


def _raised_file_limit() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # some systems allow less than they say
        return soft
    return wanted
