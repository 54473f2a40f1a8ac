"""What all kinds of abuse share: where the server is, what may be done to it now, and how a reply is judged."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from benchmarks.abuse.connection import Reply, exchange
from benchmarks.abuse.tally import Tally


@dataclasses.dataclass
class Arena:
    """away: the server is being killed, and what fails does so with reason. disturbances: when everybody had to wait or was
    aborted because an operator asked for it; who measures waits leaves them out."""

    port: int
    tally: Tally
    routes: dict[str, Any]  # paths of /openapi.json
    schemas: dict[str, Any]
    settings: dict[str, Any]  # what /set_internal_state can change, as it was
    away: bool = False
    operator: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    disturbances: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    @contextlib.asynccontextmanager
    async def disturbing(self) -> AsyncIterator[None]:
        """One operator at a time, whose doings everybody feels."""
        async with self.operator:
            started_s = time.time()
            try:
                yield
            finally:
                self.disturbances.append((started_s, time.time()))

    async def ask(self, kind: str, request: bytes) -> Reply | None:
        """A well-formed HTTP request: it must be answered, and whole. None if it was not."""
        try:
            reply = await exchange(self.port, request)
        except TimeoutError:
            self.failed(kind, "no reply within 60 s", request[:400])
        except OSError as error:
            self.failed(kind, f"no connection: {type(error).__name__}", request[:200])
        else:
            self.judge(kind, request, reply)
            return reply
        return None

    def judge(self, kind: str, request: bytes, reply: Reply) -> None:
        if self.away:
            self.tally.note(kind, "away")
        elif reply.status is None:
            self.tally.note(kind, "closed")
            self.tally.fail(kind, "closed without a reply", request[:400])
        else:
            self.tally.note_status(kind, reply.status, reply.body, request)
            if fault := _fault(reply):
                self.tally.fail(kind, fault, f"{reply.body[-250:]!r} to {request[:300]!r}")

    def failed(self, kind: str, what: str, evidence: object = "") -> None:
        """A failure, unless the server is being killed."""
        if self.away:
            self.tally.note(kind, "away")
        else:
            self.tally.note(kind, "failed")
            self.tally.fail(kind, what, evidence)


def _fault(reply: Reply) -> str | None:
    """What is wrong with the form of a reply to a well-formed HTTP request."""
    is_stream = reply.content_type.startswith(("text/event-stream", "application/x-ndjson"))
    if reply.status == 200 and is_stream and not _has_one_end(reply.body):
        return "a stream without its one end"
    if reply.status in (400, 422) and not reply.content_type.startswith("text/plain") and not is_sentence(reply.body):
        return "a refusal without a sentence"
    return None


def is_sentence(body: bytes) -> bool:
    with contextlib.suppress(ValueError):
        decoded = json.loads(body)
        error = decoded.get("error", decoded) if isinstance(decoded, dict) else {}
        return bool(error if isinstance(error, str) else error.get("message") or error.get("detail"))
    return False


_RESPONSE_ENDS = tuple(b'data: {"type":"response.%b"' % name for name in (b"completed", b"incomplete", b"failed"))


def _has_one_end(stream: bytes) -> bool:
    """OpenAI's and SGLang's, Anthropic's, that of Responses, or Ollama's."""
    *lines, last = stream.rstrip().splitlines() or [b""]
    return not any(map(_is_end, lines)) and _is_end(last)


def _is_end(line: bytes) -> bool:
    ends = (b"data: [DONE]", b'data: {"type":"message_stop"', b'data: {"type":"error","error"', *_RESPONSE_ENDS)
    return line.startswith(ends) or (line.startswith(b'{"error"') or b',"done":true' in line[:200])


@dataclasses.dataclass(frozen=True)
class Action:
    """One kind of abuse, done again and again by many at once. Larger weights are drawn more often."""

    kind: str
    weight: float
    run: Callable[[Arena, random.Random], Awaitable[None]]
