"""What requests can ask for besides text: logprobs of prompts, hidden states, grammars, tools, sessions; some leave early."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

from benchmarks.abuse.arena import Action, Arena
from benchmarks.abuse.clients import leave
from benchmarks.abuse.connection import post_json

_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "tags": {"enum": ["a", "b"]}},
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "lookup", "parameters": _SCHEMA}}
_WORDS = ("rivers", "the moon", "tea", "Paris", "ants", "why")


def _text(draw: random.Random) -> str:
    return "Tell me about " + " ".join(draw.choice(_WORDS) for _ in range(draw.randrange(1, 200)))


def _generate(draw: random.Random, sampling: dict[str, Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    sampling = {"max_new_tokens": draw.randrange(1, 60), "temperature": draw.choice([0, 1]), **sampling}
    return "/generate", {"text": _text(draw), "sampling_params": sampling, "stream": draw.random() < 0.5, **fields}


def _chat(draw: random.Random, **fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": _text(draw)}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 60, "stream": draw.random() < 0.5, **fields}


def _prompt_logprobs(draw: random.Random) -> tuple[str, dict[str, Any]]:
    named = [draw.randrange(500) for _ in range(draw.randrange(0, 70))]
    wanted = {"logprob_start_len": draw.choice([0, 0, 3, -1]), "top_logprobs_num": draw.choice([0, 1, 20])}
    return _generate(draw, {}, return_logprob=True, token_ids_logprob=named or None, **wanted)


def _hidden_states(draw: random.Random) -> tuple[str, dict[str, Any]]:
    return _generate(draw, {"max_new_tokens": 4}, return_hidden_states=draw.choice([True, "last"]))


def _grammar(draw: random.Random) -> tuple[str, dict[str, Any]]:
    # A new regex each time: it has to be compiled. The schema is known after the first.
    constraint: dict[str, Any] = (
        {"regex": f"({draw.choice(_WORDS)} ){{1,{draw.randrange(2, 9)}}}[a-z]+"}
        if draw.random() < 0.5
        else {"json_schema": json.dumps(_SCHEMA)}
    )
    return _generate(draw, {**constraint, "n": draw.choice([1, 1, 3])})


def _tools(draw: random.Random) -> tuple[str, dict[str, Any]]:
    return _chat(draw, tools=[_TOOL], tool_choice=draw.choice(["auto", "required", "none"]))


def _response_format(draw: random.Random) -> tuple[str, dict[str, Any]]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
    return _chat(draw, response_format=draw.choice([wanted, {"type": "json_object"}]), logprobs=True, top_logprobs=3)


_KINDS: dict[str, Callable[[random.Random], tuple[str, dict[str, Any]]]] = {
    "prompt logprobs": _prompt_logprobs,
    "hidden states": _hidden_states,
    "grammar": _grammar,
    "tools": _tools,
    "response format": _response_format,
}


async def _featured(arena: Arena, draw: random.Random) -> None:
    kind = draw.choice(list(_KINDS))
    path, body = _KINDS[kind](draw)
    if draw.random() < 0.3:
        await leave(arena, draw, f"feature: {kind}", body, path, draw.random() ** 2)
    else:
        await arena.ask(f"feature: {kind}", post_json(path, body))


async def _session(arena: Arena, draw: random.Random) -> None:
    """Turns one after the other, some of them branches; it is closed at its end or in the middle of a turn."""
    reply = await arena.ask("session", post_json("/open_session", {"capacity_of_str_len": 2_000}))
    if reply is None or reply.status != 200:
        return
    session, turns, before = json.loads(reply.body), draw.randrange(1, 6), None
    for turn in range(turns):
        params = {"id": session, "rid": before, "replace": draw.random() < 0.2, "drop_previous_output": draw.random() < 0.2}
        path, body = _generate(draw, {"max_new_tokens": 12}, session_params=params, stream=False)
        asked = asyncio.create_task(arena.ask("session", post_json(path, body)))
        if turn == turns - 1 and draw.random() < 0.5:
            await asyncio.sleep(draw.random() * 0.05)
            break
        reply = await asked
        if reply is not None and reply.status == 200:
            before = draw.choice([before, json.loads(reply.body)["meta_info"]["id"]])
    await arena.ask("session", post_json("/close_session", {"session_id": session}))
    await asked


ACTIONS = [Action("feature", 4, _featured), Action("session", 1, _session)]
