"""The little of HTTP that `jaxserve chat --url` needs: one streamed POST, with the standard library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

# Between two events; a busy server may queue a request for long.
_TIMEOUT_S = 600.0


class ServerError(Exception):
    """The server refused, failed or cannot be reached; the text is a sentence for the terminal."""


def stream_events(url: str, body: dict[str, Any], api_key: str | None = None) -> Iterator[dict[str, Any]]:
    """The JSON events of a server-sent event stream, up to [DONE]. Closing the iterator closes the connection."""
    if not url.startswith(("http://", "https://")):
        raise ServerError(f"{url!r} is not an http:// or https:// address.")
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}".encode().decode("latin-1")  # as UTF-8, whatever the key's characters
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
    except OSError as error:
        raise ServerError(f"{url} cannot be reached: {getattr(error, 'reason', error)}") from None
    raise ServerError("The server ended the stream before it was done.")


def _error_message(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        return f"{error.code}: {json.loads(text)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{error.code}: {text[:200] or error.reason}"
