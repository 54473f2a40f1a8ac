"""A crowd of streaming clients over the real pipeline: some never read, some leave; the others get all their text."""

from __future__ import annotations

import asyncio
import json
import random
from urllib.parse import urlsplit

import httpx
from http_harness import events_of, live_server, until
from pipeline_harness import internal_state

from jaxserve.server.pipeline import Pipeline

NUM_READERS, NUM_LEAVING, NUM_SILENT = 40, 20, 10
NUM_TOKENS = 120


def body(rid: str) -> dict[str, object]:
    return {"text": rid, "rid": rid, "stream": True, "sampling_params": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}}


async def read(client: httpx.AsyncClient, rid: str) -> int:
    """How many events a patient client gets."""
    reply = await client.post("/generate", json=body(rid))
    events = events_of(reply.text)
    finals = [event for event in events if event["meta_info"]["finish_reason"]]
    assert len(finals) == 1, "one end"
    assert finals[0] is events[-1]
    assert (len(events[-1]["output_ids"]), events[-1]["meta_info"]["id"]) == (NUM_TOKENS, rid)
    return len(events)


async def leave(url: str, rid: str, after_bytes: int) -> None:
    writer = await send(url, rid)
    await writer[0].readexactly(after_bytes)
    writer[1].transport.abort()


async def send(url: str, rid: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    data = json.dumps(body(rid)).encode()
    head = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return reader, writer


async def test_nobody_waits_for_others_and_nothing_is_left(pipeline: Pipeline) -> None:
    draw = random.Random(1)
    before = (await internal_state(pipeline))["num_aborted"]
    async with live_server(pipeline.manager) as url:  # type: ignore[arg-type]
        silent = [await send(url, f"silent-{i}") for i in range(NUM_SILENT)]
        limits = httpx.Limits(max_connections=NUM_READERS)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            leaving = [leave(url, f"left-{i}", draw.randrange(1, 4000)) for i in range(NUM_LEAVING)]
            reading = [read(client, f"read-{i}") for i in range(NUM_READERS)]
            results = await asyncio.gather(*reading, *leaving)
        assert min(count for count in results[:NUM_READERS] if count is not None) > 1
        for _, writer in silent:
            writer.close()
        await until(lambda: pipeline.manager.num_live == 0)
    state = await internal_state(pipeline)
    assert (state["num_running_reqs"], state["num_waiting_reqs"], state["num_used_tokens"]) == (0, 0, 0)
    assert state["num_leaks_repaired"] == 0
    assert state["num_aborted"] - before >= NUM_LEAVING // 2, "those that left were aborted, not run to their end"
