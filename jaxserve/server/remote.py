"""`jaxserve.RemoteEngine`: a server that runs elsewhere, behind the methods of an Engine.

    engine = jaxserve.RemoteEngine("http://gpu-1:30000", api_key="...")
    engine.generate("Hello", {"max_new_tokens": 8})["text"]

With the standard library alone. Control methods are the declared control requests that have a route, as the Engine's are; where
a route answers in words, so do they.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from jaxserve.scheduler.control.declaration import ControlStruct, first_failure
from jaxserve.scheduler.control.registry import control_of
from jaxserve.server.control.engine_methods import add_control_methods
from jaxserve.server.named_tensors import AdapterMethods, TensorUpdateMethods
from jaxserve.server.native.positions import encode_body, generate_body
from jaxserve.server.native.replies import Reply
from jaxserve.server.requests import RequestError

_END = object()
_Body = Mapping[str, Any] | ControlStruct


class RemoteEngine(TensorUpdateMethods, AdapterMethods):
    """May be used from any thread; each call has a connection of its own."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeout_s: float = 600.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """`timeout_s`: how long the server may be silent. `admin_api_key`: of control requests, if the server has one."""
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"{url!r} is not the URL of a server, such as http://localhost:30000.")
        self._url = url.rstrip("/")
        self._api_key = api_key
        self._admin_api_key = admin_api_key or api_key
        self._timeout_s = timeout_s
        self._ssl_context = ssl_context

    # --- generating

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Any = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *others: Any,
        **fields: Any,
    ) -> Reply | list[Reply] | Iterator[Reply]:
        """As Engine.generate. Raises RequestError for what the server refuses, and ConnectionError if none answers."""
        body = generate_body(prompt, sampling_params, input_ids, others, fields)
        if body.get("stream"):
            return self._events("/generate", body)
        return json.loads(self._ask("POST", "/generate", body))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Any = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *others: Any,
        **fields: Any,
    ) -> Reply | list[Reply] | AsyncIterator[Reply]:
        """As `generate`, in a thread; with `stream` the result is an async iterator."""
        body = generate_body(prompt, sampling_params, input_ids, others, fields)
        if body.get("stream"):
            return _in_thread(self._events("/generate", body))
        return json.loads(await asyncio.to_thread(self._ask, "POST", "/generate", body))

    def encode(self, prompt: Any = None, *others: Any, **fields: Any) -> Reply | list[Reply]:
        """As Engine.encode."""
        return json.loads(self._ask("POST", "/encode", encode_body(prompt, others, fields)))

    async def async_encode(self, prompt: Any = None, *others: Any, **fields: Any) -> Reply | list[Reply]:
        """As `encode`, in a thread."""
        return await asyncio.to_thread(self.encode, prompt, *others, **fields)

    def classify(self, prompt: Any = None, **fields: Any) -> Reply | list[Reply]:
        """As Engine.classify."""
        return json.loads(self._ask("POST", "/classify", encode_body(prompt, (), fields)))

    async def async_classify(self, prompt: Any = None, **fields: Any) -> Reply | list[Reply]:
        """As `classify`, in a thread."""
        return await asyncio.to_thread(self.classify, prompt, **fields)

    def rerank(self, query: str, documents: Sequence[str], **fields: Any) -> list[dict[str, Any]]:
        """As Engine.rerank of a query and documents."""
        reply = json.loads(self._ask("POST", "/rerank", {"query": query, "documents": list(documents), **fields}))
        results: list[dict[str, Any]] = reply["results"]
        return results

    async def async_rerank(self, query: str, documents: Sequence[str], **fields: Any) -> list[dict[str, Any]]:
        """As `rerank`, in a thread."""
        return await asyncio.to_thread(self.rerank, query, documents, **fields)

    # --- control

    def control(self, request: ControlStruct) -> Any:
        """Serves any control request with a route; each also has a method of its own. Returns what the route replies."""
        control = control_of(type(request))
        if control.route is None:
            raise RequestError(f"{control.name} has no route: it is for an Engine.", 404)
        path: str = control.route.path
        body: ControlStruct | None = request
        key = self._admin_api_key if control.route.needs_admin_key else self._api_key
        if control.route.fields_from == "query":
            path, body = f"{path}?{urllib.parse.urlencode(msgspec.to_builtins(request))}", None
        reply = self._ask("POST" if "POST" in control.route.methods else control.route.methods[0], path, body, key)
        if control.route.render is first_failure:
            return msgspec.json.decode(reply, type=control.reply)
        try:
            return msgspec.json.decode(reply)
        except msgspec.DecodeError:
            return reply.decode()

    async def async_control(self, request: ControlStruct) -> Any:
        """As `control`, in a thread."""
        return await asyncio.to_thread(self.control, request)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...  # the methods of control requests

    def get_server_info(self) -> dict[str, Any]:
        """What /server_info says: options and the scheduler's state."""
        return json.loads(self._ask("GET", "/server_info"))

    def get_model_info(self) -> dict[str, Any]:
        """What /model_info says: the model that is served."""
        return json.loads(self._ask("GET", "/model_info"))

    def is_ready(self) -> bool:
        """The server takes requests."""
        try:
            self._ask("GET", "/ready")
        except (RequestError, ConnectionError):
            return False
        return True

    def shutdown(self) -> None:
        """Nothing: the server belongs to somebody else."""

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # --- HTTP

    def _ask(self, method: str, path: str, body: _Body | None = None, key: str | None = None) -> bytes:
        with self._open(method, path, body, key) as reply:
            data: bytes = reply.read()
            return data

    def _open(self, method: str, path: str, body: _Body | None, key: str | None = None) -> Any:
        data = None if body is None else msgspec.json.encode(body, enc_hook=_plain)
        headers = {"Content-Type": "application/json"}
        if key or self._api_key:
            headers["Authorization"] = f"Bearer {key or self._api_key}".encode().decode("latin-1")
        request = urllib.request.Request(f"{self._url}{path}", data, headers, method=method)
        try:
            return urllib.request.urlopen(request, timeout=self._timeout_s, context=self._ssl_context)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            words = getattr(reason, "strerror", None) or reason
            raise ConnectionError(f"No server answers at {self._url}: {words}.") from error

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[Reply]:
        """Closing the iterator closes the connection, which aborts the request. Asked at once, like a whole reply."""
        reply = self._open("POST", path, body)

        def events() -> Iterator[Reply]:
            # If the server dies inside a chunk, the connection's end is an error of its own.
            with reply, contextlib.suppress(http.client.HTTPException):
                for line in reply:
                    data = line.removeprefix(b"data: ").strip()
                    if data == b"[DONE]":
                        return
                    if data:
                        event = json.loads(data)
                        if isinstance(event.get("error"), dict):
                            raise _request_error(event["error"], 500)
                        yield event
            raise ConnectionError("The server ended the stream before it was done.")

        return events()


def _plain(array: Any) -> Any:
    """Of NumPy, as an Engine takes it."""
    return array.tolist()


async def _in_thread(replies: Iterator[Reply]) -> AsyncIterator[Reply]:
    try:
        while (reply := await asyncio.to_thread(next, replies, _END)) is not _END:
            yield reply  # type: ignore[misc]
    finally:
        replies.close()  # type: ignore[attr-defined]


def _refusal(error: urllib.error.HTTPError) -> RequestError:
    text = error.read().decode(errors="replace")
    try:
        body = json.loads(text)
        return _request_error(body["error"], error.code)
    except (ValueError, LookupError, TypeError):
        return RequestError(text.strip() or error.reason, error.code)


def _request_error(error: Mapping[str, Any], status_code: int) -> RequestError:
    return RequestError(error["message"], status_code, error.get("type", "BadRequestError"), error.get("param"))


add_control_methods(RemoteEngine, lambda control: control.route is not None)
