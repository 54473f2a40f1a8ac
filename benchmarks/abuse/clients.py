"""Clients as a crowd has them: they stream, leave in the middle, send thousands of prompts, abort, read slowly."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from benchmarks.abuse.arena import Action, Arena
from benchmarks.abuse.connection import connected, get, post_json, read_reply, reset

_PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")


def _body(path: str, draw: random.Random, new_tokens: int, **extra: Any) -> dict[str, Any]:
    text = "Tell me about " + " ".join(
        draw.choice(["rivers", "the moon", "tea", "Paris", "ants", "why"]) for _ in range(draw.randrange(1, 30))
    )
    if path == "/generate":
        sampling = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": draw.choice([0, 1])}
        return {"text": text, "sampling_params": sampling, **extra}
    prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    return {"max_tokens": new_tokens, "ignore_eos": True, **prompt, **extra}


async def _stream(arena: Arena, draw: random.Random) -> None:
    path = draw.choice(_PATHS)
    await arena.ask("client: stream", post_json(path, _body(path, draw, draw.randrange(1, 60), stream=True)))


async def _whole(arena: Arena, draw: random.Random) -> None:
    path = draw.choice(_PATHS)
    many = (
        {"sampling_params": {"max_new_tokens": 4, "n": draw.randrange(1, 8)}}
        if path == "/generate"
        else {"n": draw.randrange(1, 8)}
    )
    await arena.ask("client: whole", post_json(path, _body(path, draw, 8) | many))


async def leave(arena: Arena, draw: random.Random, kind: str, body: dict[str, Any], path: str, stay_s: float) -> None:
    """Sends a request and goes after stay_s, whatever came."""
    try:
        async with connected(arena.port) as (reader, writer):
            writer.write(post_json(path, body))
            try:
                async with asyncio.timeout(stay_s):
                    reply = await read_reply(reader)
            except TimeoutError:
                arena.tally.note(kind, "left")
                if draw.random() < 0.5:
                    reset(writer)
            else:
                arena.judge(kind, post_json(path, body), reply)
    except OSError as error:
        arena.failed(kind, f"no connection: {type(error).__name__}")


async def _stream_left(arena: Arena, draw: random.Random) -> None:
    path = draw.choice(_PATHS)
    body = _body(path, draw, draw.randrange(20, 400), stream=draw.random() < 0.7)
    await leave(arena, draw, "client: leaves", body, path, draw.random() ** 3)


async def _batch_left(arena: Arena, draw: random.Random) -> None:
    texts = ["batch " + "x" * draw.randrange(20)] * draw.randrange(2, 200)
    body = {"text": texts, "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}, "stream": draw.random() < 0.5}
    await leave(arena, draw, "client: batch leaves", body, "/generate", draw.random())


async def _flood(arena: Arena, draw: random.Random) -> None:
    """Thousands of sequences in one request; then its client leaves."""
    sampling = {"max_new_tokens": 200, "ignore_eos": True}
    body = {"text": ["a"] * draw.choice([1_000, 2_000, 5_000]), "sampling_params": sampling}
    if draw.random() < 0.3:
        body = {"text": ["b"] * 100, "sampling_params": {**sampling, "n": 20}}
    await leave(arena, draw, "client: flood leaves", body, "/generate", draw.uniform(0.2, 2))
    await asyncio.sleep(3)  # floods come often, not always


async def _crowd(arena: Arena, draw: random.Random) -> None:
    """A hundred connections at the same moment, of which half leave."""
    await asyncio.gather(
        *((_stream if draw.random() < 0.5 else _stream_left)(arena, random.Random(draw.random())) for _ in range(100))
    )


async def _slow_reader(arena: Arena, draw: random.Random) -> None:
    kind = "client: reads slowly"
    try:
        async with connected(arena.port) as (reader, writer):
            writer.write(post_json("/generate", _body("/generate", draw, 1_000, stream=True)))
            for _ in range(draw.randrange(5, 30)):
                await reader.read(200)
                await asyncio.sleep(0.1)
    except OSError as error:
        arena.failed(kind, f"connection: {type(error).__name__}")
    else:
        arena.tally.note(kind, "left")


async def _abort(arena: Arena, draw: random.Random) -> None:
    """Requests under one prefix, aborted by their full ids or by the prefix: each must end, and whole."""
    prefix = f"mix-{draw.randrange(10**9)}-"
    count = draw.randrange(1, 12)
    bodies = [_body("/generate", draw, 500, stream=draw.random() < 0.5, rid=f"{prefix}{i}") for i in range(count)]
    asked = [asyncio.create_task(arena.ask("client: aborted", post_json("/generate", body))) for body in bodies]
    await asyncio.sleep(draw.random() * 0.3)
    victims = [prefix] if draw.random() < 0.5 else [body["rid"] for body in bodies]
    for victim in victims:
        await arena.ask("client: aborts", post_json("/abort_request", {"rid": victim}))
    await asyncio.gather(*asked)


async def _abort_others(arena: Arena, draw: random.Random) -> None:
    rid = draw.choice(["nobody", "mix", "cmpl-0", "chatcmpl-x", "x" * 5_000, "\u202e", "mix-" + str(draw.randrange(10))])
    await arena.ask("client: aborts", post_json("/abort_request", {"rid": rid}))


async def _same_rid(arena: Arena, draw: random.Random) -> None:
    body = _body("/generate", draw, 30, rid=f"same-{draw.randrange(3)}")
    await asyncio.gather(*(arena.ask("client: same rid", post_json("/generate", body)) for _ in range(3)))


async def _pause(arena: Arena, draw: random.Random) -> None:
    async with arena.disturbing():
        for _ in range(draw.randrange(1, 3)):
            await arena.ask(
                "operator: pause", post_json("/pause_generation", {"mode": draw.choice(["abort", "retract", "in_place"])})
            )
            if draw.random() < 0.5:
                await arena.ask("operator: flush", post_json("/flush_cache", {}))
        await asyncio.sleep(draw.random() * 0.5)
        await arena.ask("operator: continue", post_json("/continue_generation", {}))


async def _abort_all(arena: Arena, draw: random.Random) -> None:
    async with arena.disturbing():
        await arena.ask("operator: abort all", post_json("/abort_request", {"abort_all": True}))


async def _look(arena: Arena, draw: random.Random) -> None:
    reply = await arena.ask("operator: looks", get("/server_info"))
    if reply is not None and reply.status == 200:
        state = json.loads(reply.body)["internal_states"][0]
        if state["num_leaks_repaired"]:
            arena.tally.fail("operator: looks", "a leak was repaired", state)


ACTIONS = [
    Action("stream", 3, _stream),
    Action("whole", 2, _whole),
    Action("leaves", 4, _stream_left),
    Action("batch leaves", 1, _batch_left),
    Action("flood", 0.3, _flood),
    Action("crowd", 0.15, _crowd),
    Action("slow reader", 0.3, _slow_reader),
    Action("abort", 1, _abort),
    Action("abort others", 0.5, _abort_others),
    Action("same rid", 0.3, _same_rid),
    Action("look", 0.5, _look),
]
OPERATOR = [Action("pause", 2, _pause), Action("abort all", 1, _abort_all)]
