"""TLS certificates that are renewed while the server runs (`--enable-ssl-refresh`).

The files are looked at every few seconds. New ones are tried in a context of their own first: a certificate whose key has not
been written yet is left for the next look. Connections that stand keep what they began with.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl

from jaxserve.config import ServerArgs

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0

_Stamp = tuple[tuple[int, int, int] | None, ...]


class CertificateRefresher:
    def __init__(self, context: ssl.SSLContext, args: ServerArgs) -> None:
        assert args.ssl_certfile is not None, "TLS is on"
        self._context = context
        self._chain = (args.ssl_certfile, args.ssl_keyfile, args.ssl_keyfile_password)
        self._authorities = args.ssl_ca_certs
        self._seen = self._stamp()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self._context)
        except OSError as error:  # also every ssl.SSLError
            logger.warning("The TLS certificate was changed and cannot be used (%s); the one before stays.", error)
        else:
            logger.info("The TLS certificate was changed and is in use.")

    def _load(self, context: ssl.SSLContext) -> None:
        certificate, key, password = self._chain
        context.load_cert_chain(certificate, key, password or "")
        if self._authorities:
            context.load_verify_locations(self._authorities)

    def _stamp(self) -> _Stamp:
        paths = (*self._chain[:2], self._authorities)
        return tuple(_stamp_of(path) for path in paths if path)


def _stamp_of(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
