"""uvicorn around the app: how it is configured, and without its own idea of signals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn

from jaxserve.config import ServerArgs
from jaxserve.server.http.app import create_app
from jaxserve.server.http.service import GenerationService
from jaxserve.server.http.wire import StreamingProtocol

# How long connections may take to read the last bytes of their replies when the server ends.
FLUSH_S = 5
_KEEP_ALIVE_S = 30


class HttpServer(uvicorn.Server):
    """Leaves signals alone: they are about the whole server, and `jaxserve.server.launch` handles them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_http_server(service: GenerationService, args: ServerArgs) -> HttpServer:
    """Raises ValueError with a sentence if the TLS files cannot be used."""
    config = uvicorn.Config(
        create_app(service, args),
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
        server_header=False,
    )
    try:
        config.load()
    except OSError as error:  # also every ssl.SSLError
        raise ValueError(
            f"--ssl-certfile {args.ssl_certfile!r} and --ssl-keyfile {args.ssl_keyfile!r} cannot be used: {error}"
        ) from error
    return HttpServer(config)
