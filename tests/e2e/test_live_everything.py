"""Every kind of request at once, against a server with every feature on: all are answered, nothing compiles or is lost."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from live_server import LiveServer, environment, running

from jaxserve.demo import demo_model_path

OPTIONS = {
    "enable-return-hidden-states": None,
    "enable-mixed-chunk": None,
    "speculative-algorithm": "NGRAM",
    "speculative-num-draft-tokens": "3",
    "reasoning-parser": "qwen3",
    "tool-call-parser": "qwen25",
    "enable-cache-report": None,
    "warmup": "full",
    # Few programs, which nearly every request needs in chunks.
    "max-total-tokens": "8192",
    "max-running-requests": "8",
    "decode-row-buckets": "8",
    "chunked-prefill-size": "32",
    "prefill-token-buckets": "64",
    "max-prefill-tokens": "64",
}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
SCHEMA = {"type": "object", "properties": {"n": NUMBER}, "required": ["n"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}
HELLO = [{"role": "user", "content": "What is jaxserve?"}]
ANSWERED = [*HELLO, {"role": "assistant", "content": "<think>\n\n</think>"}]
TAG = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{3}"}, "end": "</n>"}
TAGGED = json.dumps({"type": "structural_tag", "format": TAG})
IDS = list(range(100, 180))
SAMPLING = {"max_new_tokens": 12, "temperature": 0.7, "sampling_seed": 1, "ignore_eos": True}
CHAT = {"messages": HELLO, "max_tokens": 16, "seed": 1}

# Path, body, what the reply must say.
REQUESTS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "greedy": ("/generate", {"input_ids": IDS, "sampling_params": {**SAMPLING, "temperature": 0}}, None),
    "sampled": (
        "/generate",
        {"input_ids": IDS, "sampling_params": {**SAMPLING, "top_k": 5, "top_p": 0.9, "min_p": 0.01}},
        None,
    ),
    "samples": ("/generate", {"text": "Once", "sampling_params": {**SAMPLING, "n": 3}}, lambda reply: len(reply) == 3),
    "batch": ("/generate", {"text": ["a", "b c"], "sampling_params": SAMPLING, "return_logprob": [True, False]}, None),
    "penalties": (
        "/generate",
        {
            "input_ids": IDS,
            "sampling_params": {**SAMPLING, "frequency_penalty": 0.5, "logit_bias": {"5": 2}, "min_new_tokens": 3},
        },
        None,
    ),
    "logprobs": (
        "/generate",
        {
            "input_ids": IDS,
            "sampling_params": SAMPLING,
            "return_logprob": True,
            "top_logprobs_num": 3,
            "logprob_start_len": 0,
            "token_ids_logprob": [5, 6],
            "return_text_in_logprobs": True,
            "return_prompt_token_ids": True,
        },
        lambda reply: len(reply["meta_info"]["input_token_logprobs"]) == len(IDS),
    ),
    "hidden states": (
        "/generate",
        {"input_ids": IDS, "sampling_params": SAMPLING, "return_hidden_states": True},
        lambda reply: [len(reply["meta_info"]["hidden_states"][0]), len(reply["meta_info"]["hidden_states"])] == [80, 12],
    ),
    "stops": ("/generate", {"text": "Once", "sampling_params": {**SAMPLING, "stop": ["e"], "stop_regex": ["[xyz]"]}}, None),
    "schema": (
        "/generate",
        {"text": "x", "sampling_params": {"max_new_tokens": 300, "json_schema": json.dumps(SCHEMA)}},
        lambda reply: jsonschema.validate(json.loads(reply["text"]), SCHEMA) is None,
    ),
    "regex": (
        "/generate",
        {"text": "x", "sampling_params": {"max_new_tokens": 20, "regex": "(ab|cd){3}"}},
        lambda reply: len(reply["text"]) == 6,
    ),
    "ebnf": (
        "/generate",
        {"text": "x", "sampling_params": {"max_new_tokens": 20, "ebnf": 'root ::= "yes" | "no"'}},
        lambda reply: reply["text"] in ("yes", "no"),
    ),
    "structural tag": (
        "/generate",
        {"text": "x", "sampling_params": {"max_new_tokens": 40, "structural_tag": TAGGED}},
        lambda reply: reply["text"].startswith("<n>") and reply["text"].endswith("</n>"),
    ),
    "completion": (
        "/v1/completions",
        {"prompt": "Once upon a time", "echo": True, "logprobs": 2, "max_tokens": 8},
        lambda reply: reply["choices"][0]["logprobs"]["token_logprobs"][0] is None,
    ),
    "best of": ("/v1/completions", {"prompt": "Once", "best_of": 3, "max_tokens": 8}, None),
    "score": (
        "/v1/score",
        {"query": IDS, "items": [[1], [2, 3]], "label_token_ids": [5, 6], "apply_softmax": True},
        lambda reply: len(reply["scores"]) == 2,
    ),
    "chat": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}, None),
    "tool": (
        "/v1/chat/completions",
        {
            **CHAT,
            "messages": ANSWERED,
            "continue_final_message": True,
            "tools": [TOOL],
            "tool_choice": "required",
            "max_tokens": 90,
        },
        lambda reply: reply["choices"][0]["finish_reason"] in ("tool_calls", "length"),
    ),
    "response_format": (
        "/v1/chat/completions",
        {
            **CHAT,
            "messages": ANSWERED,
            "continue_final_message": True,
            "max_tokens": 60,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        },
        None,
    ),
    "message": ("/v1/messages", {"model": "default", "messages": HELLO, "max_tokens": 16}, None),
    "ollama": ("/api/chat", {"model": "default", "messages": HELLO, "stream": False, "options": {"num_predict": 16}}, None),
    "response": ("/v1/responses", {"model": "default", "input": "What is jaxserve?", "max_output_tokens": 16}, None),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, compilation_cache: str) -> Iterator[LiveServer]:
    words = [word for name, value in OPTIONS.items() for word in (f"--{name}", value) if word is not None]
    log: Path = tmp_path_factory.mktemp("everything") / "server.log"
    options = ["--model-path", demo_model_path(), "--compilation-cache-dir", compilation_cache, *words]
    with running(log, *options, env=environment()) as live:
        yield live


def ask(server: LiveServer, name: str) -> None:
    path, body, holds = REQUESTS[name]
    reply = server.post(path, body)
    assert reply.status_code == 200, f"{name}: {reply.text}"
    if holds is not None:
        assert holds(reply.json()), f"{name}: {reply.text[:2000]}"


def converse(server: LiveServer) -> None:
    """A session of two turns."""
    session = server.post("/open_session", {"capacity_of_str_len": 1000}).json()
    turn = {"input_ids": IDS, "sampling_params": SAMPLING, "session_params": {"id": session}}
    first = server.generate(**turn)["meta_info"]
    second = server.generate(**{**turn, "session_params": {"id": session, "rid": first["id"]}})["meta_info"]
    assert second["prompt_tokens"] == 2 * len(IDS) + 12
    assert server.post("/close_session", {"session_id": session}).status_code == 200


def test_all_at_once_and_again_from_the_cache(server: LiveServer) -> None:
    with concurrent.futures.ThreadPoolExecutor(2 * len(REQUESTS)) as pool:
        for _ in range(2):
            asked = [pool.submit(ask, server, name) for name in REQUESTS]
            asked.append(pool.submit(converse, server))
            for one in asked:
                one.result()
    state = server.wait_idle()
    assert state["runner"]["fully_warm"] and not state["runner"]["compiles_after_ready_total"]
    server.assert_whole()


def test_streamed(server: LiveServer) -> None:
    for name in ("logprobs", "hidden states", "completion", "chat", "tool"):
        path, body, _ = REQUESTS[name]
        assert list(server.stream(path, {**body, "stream": True})), name
    server.assert_whole()
