"""Sends recorded requests again, in the rhythm in which they came or faster."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from jaxserve.bench.replay.dump_file import Recorded


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int  # of HTTP; 0: none came
    error: str = ""
    text: str = ""
    output_ids: tuple[int, ...] = ()
    finish: dict[str, Any] | None = None


async def replay(
    requests: Sequence[Recorded],
    base: str,
    *,
    headers: dict[str, str],
    speed: float,
    max_concurrency: int,
    timeout_s: float,
    answered: Callable[[Recorded, Answer], None],
) -> None:
    """`speed`: 2 halves the time between requests, infinity sends them as fast as `max_concurrency` lets. `answered` is told of
    each as it ends; of those that were under way when this is cancelled, never."""
    slots = asyncio.Semaphore(max_concurrency)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:

        async def send(recorded: Recorded) -> None:
            await asyncio.sleep(started_s + (recorded.received_s - requests[0].received_s) / speed - loop.time())
            async with slots:
                answered(recorded, await _ask(session, f"{base}/generate", recorded.body, timeout_s))

        await asyncio.gather(*map(send, requests))


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], timeout_s: float) -> Answer:
    try:
        async with session.post(url, json=body) as reply:
            data = await reply.read()
            if reply.status != 200:
                return Answer(reply.status, _message(data) or str(reply.reason))
            content = json.loads(data)
            ids = tuple(content["output_ids"])
            return Answer(200, "", content["text"], ids, content["meta_info"]["finish_reason"])
    except TimeoutError:
        return Answer(0, f"no reply within {timeout_s:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return Answer(0, str(error) or type(error).__name__)
    except (ValueError, LookupError, TypeError):
        return Answer(200, "the reply is not one of /generate")


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return data.decode(errors="replace").strip()[:200]
