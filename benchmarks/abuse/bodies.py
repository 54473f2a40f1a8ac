"""Random and mutated JSON on every route that the server says it has."""

from __future__ import annotations

import random
import re
from typing import Any

from benchmarks.abuse.arena import Action, Arena
from benchmarks.abuse.connection import get, post, post_json
from benchmarks.abuse.hostile import encode, hostile_value, mutated

_SAMPLING = {"max_new_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop": ["x"], "logit_bias": {"5": 1.0}}
_CHAT = {"role": "user", "content": "Hello"}
_GOOD: dict[str, dict[str, Any]] = {
    "/generate": {"text": "Hello", "sampling_params": _SAMPLING, "stream": False, "return_logprob": False, "rid": "mix"},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4, "stream": True, "logprobs": 1, "stop": ["x"], "n": 1},
    "/v1/chat/completions": {
        "model": "m",
        "messages": [_CHAT],
        "max_tokens": 4,
        "stream": False,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4, "stream": True, "store": True, "instructions": "x"},
    "/v1/messages": {"model": "default", "messages": [_CHAT], "max_tokens": 4, "stream": True, "system": "x", "top_k": 5},
    "/v1/messages/count_tokens": {"model": "default", "messages": [_CHAT]},
    "/api/chat": {"model": "default", "messages": [_CHAT], "options": {"num_predict": 4, "seed": 1}, "keep_alive": 1},
    "/api/generate": {"model": "default", "prompt": "Hello", "options": {"num_predict": 4}, "raw": True, "stream": False},
    "/api/show": {"model": "default"},
    "/v1/score": {
        "query": "Is it tea?",
        "items": ["Yes", "No"],
        "label_token_ids": [[5, 6], [7]],
        "apply_softmax": True,
        "temperature": 0.5,
        "return_token_logprobs": True,
    },
    "/parse_function_call": {"text": "<tool_call>{}</tool_call>", "tool_call_parser": "qwen25", "tools": []},
    "/separate_reasoning": {"text": "<think>x</think>y", "reasoning_parser": "qwen3"},
    "/tokenize": {"prompt": "Hello"},
    "/v1/tokenize": {"messages": [_CHAT]},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/detokenize": {"tokens": [5]},
    "/abort_request": {"rid": "nobody"},
    "/pause_generation": {"mode": "retract"},
    "/set_internal_state": {"server_args": {"decode_log_interval": 40}},
    "/slow_down": {"forward_sleep_time": 0.001},
    "/update_weights_from_disk": {"model_path": "/nowhere"},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["gAROLg=="]},
    "/update_weights_from_distributed": {
        "names": ["model.norm.weight"],
        "dtypes": ["float32"],
        "shapes": [[64]],
        "address": "127.0.0.1:9",
        "uuid": 1,
        "timeout_s": 0.1,
    },
    "/load_lora_adapter_from_tensors": {"lora_name": "a", "config_dict": {"r": 1}, "serialized_tensors": "gAROLg=="},
    "/release_memory_occupation": {"tags": ["kv_cache"]},
    "/resume_memory_occupation": {"tags": ["kv_cache"]},
}
_HARMLESS = [
    "/generate",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/v1/score",
    "/parse_function_call",
    "/separate_reasoning",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/v1/detokenize",
]
_WRITES_FILES = ["/configure_logging", "/start_profile"]  # where they are told to
_CONTENT_TYPES = [
    "text/plain",
    "",
    "application/json; charset=utf-16",
    "multipart/form-data; boundary=x",
    "application/xml",
    "APPLICATION/JSON",
]


async def _bad_body(arena: Arena, draw: random.Random) -> None:
    path = draw.choice(_HARMLESS)
    await arena.ask(f"json: {path}", _request(arena, path, draw))


async def _operators_bad_body(arena: Arena, draw: random.Random) -> None:
    """On routes that change the server, one at a time; what a body that was valid after all has done is undone."""
    others = [path for path, methods in arena.routes.items() if "post" in methods and path not in (*_HARMLESS, *_WRITES_FILES)]
    path = draw.choice(others)
    async with arena.disturbing():
        await arena.ask(f"json: {path}", _request(arena, path, draw))
        await undo(arena)


async def undo(arena: Arena) -> None:
    """Brings the server back to what it is without an operator."""
    await arena.ask("operator: undo", post_json("/slow_down", {"forward_sleep_time": None}))
    await arena.ask("operator: undo", post_json("/continue_generation", {}))
    for tag in ("weights", "kv_cache"):  # 400 if it is there
        await arena.ask("operator: undo", post_json("/resume_memory_occupation", {"tags": [tag]}))
    await arena.ask("operator: undo", post_json("/set_internal_state", {"server_args": arena.settings}))


def _request(arena: Arena, path: str, draw: random.Random) -> bytes:
    good = _GOOD.get(path, {})
    if draw.random() < 0.1:
        return post(path, encode(hostile_value(draw)))
    data = mutated(good, _fields(arena, path), draw)
    return post(path, data, draw.choice(_CONTENT_TYPES) if draw.random() < 0.05 else "application/json")


def _fields(arena: Arena, path: str) -> list[str]:
    """The names of a route's fields, from the server's own description."""
    content = arena.routes.get(path, {}).get("post", {}).get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    if reference := schema.get("$ref"):
        schema = arena.schemas.get(reference.rpartition("/")[2], {})
    return list(schema.get("properties", {}))


async def _read(arena: Arena, draw: random.Random) -> None:
    path = draw.choice(
        [path for path, methods in arena.routes.items() if "get" in methods] + ["/nowhere", "/docs", "/openapi.json"]
    )
    await arena.ask(
        "get",
        get(
            re.sub(r"\{\w+\}", draw.choice(["x", "%00", "a/b", "%F0%9F%92%A9"]), path)
            + draw.choice(["", "?x=1", "?" + "y" * 3000])
        ),
    )


ACTIONS = [
    Action("json", 6, _bad_body),
    Action("get", 1, _read),
]
OPERATOR = [Action("operator's json", 4, _operators_bad_body)]
