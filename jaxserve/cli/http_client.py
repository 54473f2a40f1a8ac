"""The little of HTTP that `jaxserve chat --url` needs, with the standard library: is a server there, and one streamed POST."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

# Between two events; a busy server may queue a request for long. Also how long a server may take to become ready.
_TIMEOUT_S = 600.0
_PROBE_TIMEOUT_S = 10.0
_POLL_S = 0.5
# What can go wrong between here and the server: the connection, HTTP, an address or key that HTTP cannot carry, no JSON.
_FAILURES = (OSError, http.client.HTTPException, ValueError)


class ServerError(Exception):
    """The server refused, failed or cannot be reached; the text is a sentence for the terminal."""


def base_url(address: str) -> str:
    """An address as it is written (localhost:30000, http://host/v1/) as the URL that the server's paths follow."""
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urllib.parse.urlsplit(url)
        is_server = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of a port that is no number, or of brackets
        is_server = False
    if not is_server:
        raise ServerError(f"{address!r} is not the address of a server, such as http://localhost:30000.")
    return url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")


def wait_for_server(base: str, api_key: str | None, say: Callable[[str], None]) -> str:
    """The name of the model that is served. Waits for a server that is starting, and says so once."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    waiting = False
    while _status(f"{base}/ready") == http.HTTPStatus.SERVICE_UNAVAILABLE:
        if time.monotonic() > deadline_s:
            raise ServerError(f"The server at {base} did not become ready within {_TIMEOUT_S:g} s.")
        if not waiting:
            say(f"The server at {base} is not ready yet; waiting for it.")
        waiting = True
        time.sleep(_POLL_S)
    return _served_model(base, api_key)


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_TIMEOUT_S) as reply:
            status: int = reply.status
            return status
    except urllib.error.HTTPError as error:
        return error.code
    except _FAILURES as error:
        raise _unreachable(url.removesuffix("/ready"), error) from None


def _served_model(base: str, api_key: str | None) -> str:
    request = urllib.request.Request(f"{base}/v1/models", headers=authorization(api_key))
    try:
        with urllib.request.urlopen(request, timeout=_PROBE_TIMEOUT_S) as reply:
            return str(json.load(reply)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        if error.code in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
            wanted = "does not take this --api-key" if api_key else "wants a key: give --api-key"
            raise ServerError(f"The server at {base} {wanted}.") from None
        raise ServerError(f"{base} answers /v1/models with {error.code}: it is not a server for chat.") from None
    except OSError as error:
        raise _unreachable(base, error) from None
    except (*_FAILURES, LookupError, TypeError):
        raise ServerError(f"{base} does not answer /v1/models as OpenAI does: it is not a server for chat.") from None


def stream_events(url: str, body: dict[str, Any], api_key: str | None = None) -> Iterator[dict[str, Any]]:
    """The JSON events of a server-sent event stream, up to [DONE]. Closing the iterator closes the connection."""
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **authorization(api_key)}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            for line in reply:
                if not line.startswith(b"data: "):
                    continue
                data = line[len(b"data: ") :].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if event.get("error"):
                    raise ServerError(str(event["error"]["message"]))
                yield event
    except urllib.error.HTTPError as error:
        raise ServerError(_error_message(error)) from None
    except _FAILURES as error:
        raise _unreachable(url, error) from None
    raise ServerError("The server ended the stream before it was done.")


def authorization(api_key: str | None) -> dict[str, str]:
    if not api_key:
        return {}
    return {"Authorization": f"Bearer {api_key}".encode().decode("latin-1")}  # as UTF-8, whatever the key's characters


def _unreachable(url: str, error: Exception) -> ServerError:
    reason = getattr(error, "reason", error)
    return ServerError(f"No server answers at {url}: {getattr(reason, 'strerror', None) or reason}.")


def _error_message(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read().decode(errors="replace")
        return f"{error.code}: {json.loads(text)['error']['message']}"
    except (*_FAILURES, LookupError, TypeError):
        return f"{error.code}: {error.reason}"
