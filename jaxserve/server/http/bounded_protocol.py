"""BoundedProtocol: uvicorn's HTTP protocol of one connection, with limits on what is read before a request is whole.

    bytes -> slices -> parser (llhttp) -> callbacks: count, compare, refuse -> uvicorn's request

A head has a size and a deadline. A body's size is the app's matter (`limits`); here it has a least rate, and what frames it has
a size. Once a request is whole no clock runs: its client may wait for the reply as long as it likes, but has to take what there
is of it (`stall`). A refusal is an ordinary reply where one can still be sent, and the end of the connection.

Requests that ask for another protocol (`Upgrade:`) are served as if they had not asked, as RFC 9110 has it.

What comes over a Unix socket has been passed on by another process of this server (`pass_on`), which limits and logs it.
"""

from __future__ import annotations

import enum
import socket
from asyncio import Transport
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from jaxserve.server.http.connection_limits import Admission
from jaxserve.server.http.envelopes import envelope_of
from jaxserve.server.http.stall import StallWatch
from jaxserve.server.requests import RequestError

# Heads are read in slices, so that no more than a slice beyond the limit is taken in.
_HEAD_SLICE_BYTES = 16 << 10
# Chunks of one byte have five of framing; so many per byte of the body are allowed.
_FRAMING_PER_BYTE = 16
# After a refusal the client has so long to read it: a connection closed while data comes in would lose the reply.
_LINGER_S = 1.0
_PASSED_ON = "jaxserve.passed_on"


def was_passed_on(scope: Scope) -> bool:
    """Whether the request came from another process of this server. Not told by `client`: proxies' headers fill that."""
    return _PASSED_ON in scope.get("extensions", {})


class _Phase(enum.Enum):
    BETWEEN = enum.auto()  # requests
    HEAD = enum.auto()
    BODY = enum.auto()


class BoundedProtocol(HttpToolsProtocol):
    def __init__(self, admission: Admission, *, ended: Callable[[], None] | None = None, **kwargs: Any) -> None:
        """`ended` is called once, when the connection is over."""
        super().__init__(**kwargs)
        self._ended = ended
        self._admission = admission
        self._limits = admission.limits
        self._phase = _Phase.BETWEEN
        self._is_over = False  # whatever still comes in is dropped
        self._answered: RequestResponseCycle | None = None  # the request whose turn it is, or was
        self._clock: Any = None  # runs while a head or a body is awaited
        self._unparsed_bytes = 0  # of a head, as they came
        self._header_bytes = 0  # of a head, parsed
        self._body_bytes = 0
        self._raw_body_bytes = 0  # with what frames them

    # --- the connection

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_inside = _is_unix(transport)
        if self._is_inside:
            self._limits = self._limits.passed_on()
            self.access_log = False  # each request has one line
        self._stall = StallWatch(self.loop, transport, self._limits.stall_timeout_s)
        if self._admission.admit(self):
            self._start_clock(self._limits.head_timeout_s, self._on_late_head)
        else:
            self._refuse(_error(503, "The server has all the connections it can take; try again later."), linger_s=0)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end_once()
        self._is_over = True
        self._stop_clock()
        self._stall.stop()
        self._admission.leave(self)
        self._tell_disconnected(self._answered)  # uvicorn tells the request that came last
        self._answered = None
        super().connection_lost(exc)

    def end_once(self) -> None:
        """Tells whoever wants to know that the connection is over."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()

    def make_room(self) -> None:
        if self._phase is _Phase.BETWEEN:
            self._end(linger_s=0)
        else:
            self._refuse(_error(503, "Others need the connection, and the request is not whole yet."), linger_s=0)

    def shutdown(self) -> None:
        """The server ends, and what is not whole does not become so."""
        if self._is_reading_current:
            self._refuse(_error(503, "The server is ending."))
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._unset_keepalive_if_required()
        try:
            self._read(memoryview(data))
        except RequestError as error:
            self._refuse(error)
        except httptools.HttpParserCallbackError as error:
            reason = error.__context__  # what the callback raised; uvicorn's raises at targets that are no paths
            self._refuse(reason if isinstance(reason, RequestError) else _error(400, "The request's path cannot be read."))
        except httptools.HttpParserError as error:
            self._refuse(_error(400, f"This is not HTTP: {error}."))
        else:
            self._watch()

    def _read(self, data: memoryview) -> None:
        while data and not self._is_over:
            piece = data if self._phase is _Phase.BODY else data[:_HEAD_SLICE_BYTES]
            phase, message = self._phase, self.headers
            try:
                self.parser.feed_data(piece)
                num_read = len(piece)
            except httptools.HttpParserUpgrade as upgrade:
                num_read = upgrade.args[0]
                self._go_on_without_upgrade()
            data = data[num_read:]
            # A slice with the end of one thing and the beginning of the next counts for neither.
            if phase is self._phase and message is self.headers:
                self._count(num_read)

    def _count(self, num_bytes: int) -> None:
        """Bytes that belong to the head, or to the body, that is being read."""
        if self._phase is _Phase.BODY:
            self._raw_body_bytes += num_bytes
            framing_bytes = self._raw_body_bytes - _FRAMING_PER_BYTE * self._body_bytes
            self._check(framing_bytes, self._limits.framing_bytes, 400, "Chunk extensions and trailers")
        else:
            self._unparsed_bytes += num_bytes
            self._check(self._unparsed_bytes, self._limits.head_bytes, 431, "The request's headers")

    @staticmethod
    def _check(num_bytes: int, limit: int, status: int, what: str) -> None:
        if num_bytes > limit:
            raise _error(status, f"{what} may have at most {limit} bytes.")

    def _go_on_without_upgrade(self) -> None:
        """The parser has stopped behind a head that asks for another protocol: it starts over with that head, less the wish."""
        method: bytes = self.parser.get_method()
        if method == b"CONNECT":
            raise _error(405, "This server is no proxy: it does not accept the method CONNECT.")
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] not in (b"upgrade", b"http2-settings")]
        version = self.parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(lines))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(head)

    # --- the parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = _Phase.HEAD
        self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._check(len(self.url) + len(url), self._limits.target_bytes, 414, "The request's path and query")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is _Phase.BODY:
            return  # a trailer: nobody reads them, and headers that were checked stay as they are
        self._header_bytes += len(name) + len(value)
        self._check(self._header_bytes, self._limits.head_bytes, 431, "The request's headers")
        if len(self.headers) == self._limits.num_headers:
            raise _error(431, f"A request may have at most {self._limits.num_headers} headers.")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # see _go_on_without_upgrade
        if len(self.pipeline) == self._limits.num_pipelined:
            raise _error(400, f"At most {self._limits.num_pipelined} requests may wait on one connection.")
        super().on_headers_complete()  # raises at targets that cannot be read
        if self._is_inside:
            self.scope["extensions"] = {_PASSED_ON: {}}
        self._stop_clock()
        self._phase = _Phase.BODY
        self._unparsed_bytes = self._body_bytes = self._raw_body_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._phase is not _Phase.BODY:
            return  # see on_headers_complete
        self._stop_clock()
        self._phase = _Phase.BETWEEN
        super().on_message_complete()
        if self._is_answering:
            self._admission.has_request(self)
        else:  # answered early
            self._admission.is_idle(self)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        self._stall.stop()
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._stall.start()
        super().on_response_complete()
        if self._phase is _Phase.BODY:  # of a request that waited, or was answered early
            self._start_body_window()
        if self._phase is _Phase.BODY or not self._is_answering:
            self._admission.is_idle(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall.start()

    def resume_writing(self) -> None:
        self._stall.stop()
        super().resume_writing()

    # --- clocks

    def _watch(self) -> None:
        """After data came in: the clock of what is not whole yet."""
        if self._clock is not None or self._is_over:
            return
        if self._phase is _Phase.BODY:
            self._start_body_window()
        elif self._phase is _Phase.HEAD or self._unparsed_bytes or not self._is_answering:
            self._start_clock(self._limits.head_timeout_s, self._on_late_head)

    def _start_clock(self, delay_s: float, when_over: Any, *values: Any) -> None:
        self._stop_clock()
        self._clock = self.loop.call_later(delay_s, when_over, *values)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _on_late_head(self) -> None:
        self._clock = None
        if self._is_answering:  # what was asked before is not to blame
            self._start_clock(self._limits.head_timeout_s, self._on_late_head)
        elif self._phase is _Phase.BETWEEN and not self._unparsed_bytes:
            self._end(linger_s=0)  # it has asked for nothing
        else:
            self._admission.warnings.warn("Refused a request whose headers took longer than %g s.", self._limits.head_timeout_s)
            self._refuse(_error(408, f"The request's headers took longer than {self._limits.head_timeout_s:g} s."))

    def _start_body_window(self) -> None:
        self._start_clock(self._limits.body_window_s, self._on_body_window, self._body_bytes)

    def _on_body_window(self, num_bytes_before: int) -> None:
        self._clock = None
        limits = self._limits
        if self.flow.read_paused or self._body_bytes - num_bytes_before >= limits.body_window_bytes:
            self._start_body_window()
            return
        self._admission.warnings.warn(
            "Refused a request whose body brought less than %d bytes in %g s.", limits.body_window_bytes, limits.body_window_s
        )
        rule = f"fewer than {limits.body_window_bytes} bytes of it came in {limits.body_window_s:g} s"
        self._refuse(_error(408, f"The request's body is too slow: {rule}."))

    # --- the end

    @property
    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    @property
    def _is_reading_current(self) -> bool:
        """The body that is being read is that of the request whose turn it is, and nothing of a reply is out."""
        return self._phase is _Phase.BODY and self.cycle is self._answered and not self.cycle.response_started

    def _refuse(self, error: RequestError, linger_s: float = _LINGER_S) -> None:
        """Ends the connection, with the error as its last reply unless another reply is due or under way."""
        is_current = self._is_reading_current
        if self._is_answering and not is_current:
            self.transport.abort()  # what is asked for before cannot be answered whole any more
            return
        if self._phase is _Phase.BODY and not is_current:  # answered early
            self._end(linger_s=0)
            return
        path = self.scope["path"] if is_current else ""
        body = msgspec.json.encode(envelope_of(path).body(error))
        headers = [*self.server_state.default_headers, (b"content-type", b"application/json"), (b"connection", b"close")]
        lines = [b"%b: %b\r\n" % header for header in (*headers, (b"content-length", b"%d" % len(body)))]
        self.transport.write(STATUS_LINE[error.status_code] + b"".join(lines) + b"\r\n" + body)
        self._end(linger_s)

    def _end(self, linger_s: float) -> None:
        self._is_over = True
        self._stop_clock()
        self._unset_keepalive_if_required()
        self._tell_disconnected(self._answered)
        if linger_s and self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(linger_s, self.transport.close)
        else:
            self.transport.close()
        self._stall.start()

    @staticmethod
    def _tell_disconnected(cycle: RequestResponseCycle | None) -> None:
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()


def _is_unix(transport: Transport) -> bool:
    connection = transport.get_extra_info("socket")
    return connection is not None and connection.family == socket.AF_UNIX


def _error(status: int, message: str) -> RequestError:
    err_types = {405: "MethodNotAllowedError", 408: "RequestTimeoutError", 503: "ServiceUnavailableError"}
    err_types |= dict.fromkeys((414, 431), "RequestTooLargeError")
    return RequestError(message, status, err_types.get(status, "BadRequestError"))
