"""Passing on requests that another process of this server answers. It is the innermost layer of a front process: keys, web
pages, body limit, metrics and traces have had their turn, and have theirs again where the request goes.

    what concerns the whole server (`main_paths`)   goes to the main process, and the app does not see it
    AnsweredElsewhere comes out of the app          the request goes to whom it names, with the body that the app has read

A request is passed on once. The main process has none of this: it answers what it is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress

import httptools
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.elsewhere import AnsweredElsewhere, Place, name_of
from jaxserve.server.http.bounded_protocol import was_passed_on
from jaxserve.server.http.connection import unless_disconnected
from jaxserve.server.http.connection_limits import RareWarnings
from jaxserve.server.http.errors import error_response
from jaxserve.server.http.relay import Reply, relay, request_head
from jaxserve.server.requests import ERR_TYPES, RequestError

logger = logging.getLogger(__name__)


class PassOnMiddleware:
    def __init__(self, app: ASGIApp, place: Place, main_paths: Collection[str], root_path: str) -> None:
        self._app = app
        self._place = place
        self._main_paths = frozenset(main_paths)
        self._root_path = root_path
        self._warnings = RareWarnings()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(receive, send)
        owner = None
        if scope["path"] not in self._main_paths:
            try:
                await self._app(scope, exchange.receive, exchange.send)
                return
            except AnsweredElsewhere as elsewhere:
                owner = elsewhere.front
        assert not exchange.has_begun, f"{scope['path']}: {name_of(owner)} can answer what this process has begun to answer"
        assert owner != self._place.front, f"{scope['path']}: {name_of(owner)} says that it cannot answer, but itself can"
        try:
            with suppress(ClientDisconnect):
                await self._pass_on(scope, exchange, send, owner)
        except RequestError as error:
            await error_response(scope["path"], error)(scope, receive, send)

    async def _pass_on(self, scope: Scope, exchange: _Exchange, send: Send, owner: int | None) -> None:
        if was_passed_on(scope):
            logger.error("A request for %s was passed on to this process, but is for %s.", scope["path"], name_of(owner))
            message = "Internal server error: the processes of the server disagree about who can answer this."
            raise RequestError(message, 500, ERR_TYPES[500])
        body = await exchange.whole_body()
        body.insert(0, request_head(scope, self._root_path, sum(map(len, body))))
        await unless_disconnected(exchange.receive, self._relay(scope, body, send, owner))

    async def _relay(self, scope: Scope, request: list[bytes], send: Send, owner: int | None) -> None:
        reply = Reply(scope, send)
        try:
            await relay(self._place.socket_of(owner), request, reply)
        except (OSError, EOFError, httptools.HttpParserError) as error:
            self._warnings.warn(
                "A request for %s was passed on to %s and not answered: %r.", scope["path"], name_of(owner), error
            )
            if not reply.has_begun:
                message = f"{name_of(owner).capitalize()}, which has what this request needs, does not answer; try again later."
                raise RequestError(message, 503, ERR_TYPES[503]) from None
            # It stays without its end, for which uvicorn breaks off the connection.


class _Exchange:
    """The receive and send of one request. What its body brings is remembered until the response begins."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._parts: list[bytes] = []
        self._is_whole = False
        self.has_begun = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            if not self.has_begun and message.get("body"):
                self._parts.append(message["body"])
            self._is_whole = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        self.has_begun = True
        self._parts.clear()
        await self._send(message)

    async def whole_body(self) -> list[bytes]:
        """With what the app has left unread. Raises ClientDisconnect."""
        while not self._is_whole:
            if (await self.receive())["type"] == "http.disconnect":
                raise ClientDisconnect
        return self._parts
