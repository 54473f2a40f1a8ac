"""One request over HTTP: sent, read event by event, and what came of it, failures included."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp

from jaxserve.bench.serving.apis import Reading, ReplyError, body_of, next_content
from jaxserve.bench.serving.options import CHAT
from jaxserve.bench.serving.work import (
    CONNECTION,
    CUT,
    INTERRUPTED,
    REFUSED,
    TIMED_OUT,
    UNREADABLE,
    Content,
    Load,
    Outcome,
    Task,
)

_DONE = b"[DONE]"
# Of a message that a server wrote.
_MAX_ERROR_CHARS = 500


def session_of(load: Load) -> aiohttp.ClientSession:
    """A connection per request, as clients of their own would have."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=load.timeout_s)
    headers = {"Content-Type": "application/json", **load.headers}
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers, read_bufsize=1 << 20)


async def send_task(session: aiohttp.ClientSession, load: Load, number: int, task: Task) -> list[Outcome]:
    """The request, or all turns of the conversation up to one that fails: those behind it were never sent."""
    content: Content = task.turns[0]
    if load.api == CHAT and len(task.turns) > 1 and isinstance(content, str):
        content = [{"role": "user", "content": content}]
    outcomes: list[Outcome] = []
    for turn in range(len(task.turns)):
        if turn:
            content = next_content(content, outcomes[-1].text, task.turns[turn])
        outcome = Outcome(task=number, turn=turn, start_s=0.0, prompt_len=0 if turn else task.prompt_len)
        outcomes.append(outcome)
        await send(session, load, body_of(load, task, content), outcome)
        if not outcome.ok:
            break
    return outcomes


async def send(session: aiohttp.ClientSession, load: Load, body: object, outcome: Outcome) -> None:
    """Fills `outcome`. Never raises for what a server does; when cancelled, the outcome says so."""
    data = json.dumps(body).encode()
    reading = Reading(load, outcome)
    outcome.start_s = started_s = time.monotonic()
    try:
        async with session.post(load.url, data=data) as reply:
            if reply.status != 200:
                outcome.error_kind = f"HTTP {reply.status}"
                outcome.error = _server_message(await reply.text(errors="replace")) or str(reply.reason)
            elif load.stream:
                await _read_stream(reply, reading, started_s, outcome)
            else:
                whole = await reply.read()
                outcome.e2e_s = time.monotonic() - started_s
                reading.take(whole, outcome.e2e_s)
    except asyncio.CancelledError:
        outcome.error_kind, outcome.error = INTERRUPTED, "not finished when the run was interrupted"
    except ReplyError as error:
        outcome.error_kind, outcome.error = error.kind, str(error)
    except TimeoutError:
        outcome.error_kind, outcome.error = TIMED_OUT, f"no whole reply within {load.timeout_s:g} s"
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, ConnectionRefusedError)
        outcome.error_kind, outcome.error = REFUSED if refused else CONNECTION, str(error)
    except aiohttp.ClientPayloadError as error:
        outcome.error_kind, outcome.error = CUT, str(error)
    except (aiohttp.ClientError, OSError) as error:
        outcome.error_kind = CUT if outcome.num_events else CONNECTION
        outcome.error = str(error) or type(error).__name__
    except ValueError as error:  # an address, a header or a line that HTTP cannot carry
        outcome.error_kind, outcome.error = UNREADABLE, str(error)
    reading.end()
    outcome.error = outcome.error[:_MAX_ERROR_CHARS]
    outcome.e2e_s = outcome.e2e_s or time.monotonic() - started_s


async def _read_stream(reply: aiohttp.ClientResponse, reading: Reading, started_s: float, outcome: Outcome) -> None:
    """Server-sent events until [DONE]; `e2e_s` is when the last of them came."""
    rest, done = b"", False
    async for data in reply.content.iter_any():
        now_s = time.monotonic() - started_s
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            outcome.e2e_s = now_s
            event = line[5:].strip()
            if event == _DONE:
                done = True
            else:
                reading.take(event, now_s)
    if not (done or reading.finished):
        raise ReplyError(CUT, f"the stream ended without [DONE] after {outcome.num_events} events")


def _server_message(text: str) -> str:
    """The sentence in an error reply of OpenAI's, SGLang's or FastAPI's form."""
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip()
    for _ in range(2):
        if isinstance(value, dict):
            value = value.get("error") or value.get("message") or value.get("detail") or text
    return str(value).strip()
