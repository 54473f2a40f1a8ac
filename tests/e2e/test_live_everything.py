"""Every kind of request at once, against a server with every feature on: all are answered, nothing compiles or is lost."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from live_server import DEPLOYMENTS, LiveServer, environment, running
from safetensors.torch import load_file

from jaxserve.demo import demo_model_path

OPTIONS = {
    "enable-custom-logit-processor": None,
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

EMBEDS = load_file(Path(demo_model_path(), "model.safetensors"))["model.embed_tokens.weight"][IDS].float().tolist()

# Path, body, what the reply must say.
REQUESTS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "greedy": ("/generate", {"input_ids": IDS, "sampling_params": {**SAMPLING, "temperature": 0}}, None),
    "sampled": (
        "/generate",
        {"input_ids": IDS, "sampling_params": {**SAMPLING, "top_k": 5, "top_p": 0.9, "min_p": 0.01}},
        None,
    ),
    "embeddings": (
        "/generate",
        {
            "input_embeds": [EMBEDS, EMBEDS[:9]],
            "sampling_params": {**SAMPLING, "n": 2},
            "return_logprob": True,
            "return_hidden_states": [False, True],
        },
        lambda reply: [one["meta_info"]["prompt_tokens"] for one in reply] == [80, 80, 9, 9],
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
        {"text": "x", "sampling_params": {"max_new_tokens": 300, "temperature": 0, "json_schema": json.dumps(SCHEMA)}},
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
    "disallowed tokens": (
        "/generate",
        {
            "input_ids": IDS,
            "sampling_params": {**SAMPLING, "temperature": 3, "custom_params": {"token_ids": [*range(5, 500)]}},
            "custom_logit_processor": "disallowed_tokens",
        },
        lambda reply: not set(reply["output_ids"]) & set(range(5, 500)),
    ),
    "no token twice": (
        "/generate",
        {
            "input_ids": IDS,
            "sampling_params": {**SAMPLING, "max_new_tokens": 50, "custom_params": {"ngram_size": 1, "window_size": 1000}},
            "custom_logit_processor": "no_repeat_ngram",
        },
        lambda reply: len(set(reply["output_ids"] + IDS)) == 50 + len(IDS),
    ),
    "thinking budget": (
        "/generate",
        {"text": "Why? <think>\n", "max_thinking_tokens": 6, "sampling_params": {**SAMPLING, "max_new_tokens": 40, "n": 2}},
        lambda reply: all("\n</think>" in one["text"] for one in reply),
    ),
    "thinking budget of token ids": (
        "/generate",
        {
            "input_ids": IDS,
            "require_reasoning": True,
            "max_thinking_tokens": 6,
            "sampling_params": {**SAMPLING, "max_new_tokens": 40},
        },
        lambda reply: "</think>" in reply["text"],
    ),
    "chat with a thinking budget": (
        "/v1/chat/completions",
        {
            **CHAT,
            "messages": [*HELLO, {"role": "assistant", "content": "<think>"}],
            "continue_final_message": True,
            "custom_params": {"thinking_budget": 3},
            "max_tokens": 40,
            "ignore_eos": True,
        },
        lambda reply: reply["choices"][0]["message"]["content"] and reply["choices"][0]["message"]["reasoning_content"],
    ),
    "thinking budget and a grammar": (
        "/generate",
        {
            "text": "Why? <think>\n",
            "require_reasoning": True,
            "sampling_params": {"max_new_tokens": 60, "regex": "(ab|cd){3}", "custom_params": {"thinking_budget": 3}},
            "custom_logit_processor": "thinking_budget",
        },
        lambda reply: len(reply["text"].rpartition("</think>")[2].strip()) == 6,
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
    "message with a thinking budget": (
        "/v1/messages",
        {
            "model": "default",
            "messages": HELLO,
            "max_tokens": 16,
            "thinking": {"type": "enabled", "budget_tokens": 2},
        },
        None,
    ),
    "ollama": ("/api/chat", {"model": "default", "messages": HELLO, "stream": False, "options": {"num_predict": 16}}, None),
    "response": ("/v1/responses", {"model": "default", "input": "What is jaxserve?", "max_output_tokens": 16}, None),
}


def own_code(name: str, **params: Any) -> dict[str, Any]:
    """The fields of a request with one of the classes in `user_code`."""
    import user_code
    from sent import as_text

    return {"custom_logit_processor": as_text(getattr(user_code, name)), "custom_params": params}


def native(prompt: dict[str, Any], code: dict[str, Any], **sampling: Any) -> dict[str, Any]:
    params = {**SAMPLING, **sampling, "custom_params": code["custom_params"]}
    return {**prompt, "custom_logit_processor": code["custom_logit_processor"], "sampling_params": params}


VOCAB_SIZE = 2048
REQUESTS |= {
    "own code": (
        "/generate",
        native({"input_ids": IDS}, own_code("AddBias", step=3)),
        lambda reply: reply["output_ids"] == [((n + 1) * 3 + len(IDS)) % VOCAB_SIZE for n in range(12)],
    ),
    "own code, samples": (
        "/generate",
        native({"input_ids": [5, 6]}, own_code("Echo"), n=3),
        lambda reply: [one["output_ids"][:2] for one in reply] == [[1, 4]] * 3,
    ),
    "own code and a grammar": (
        "/generate",
        native({"text": "x"}, own_code("AddBias", step=1), regex="(ab|cd){3}"),
        lambda reply: len(reply["text"]) == 6,
    ),
    "own code that changes nothing": (
        "/generate",
        native({"input_ids": IDS}, own_code("Unchanged"), temperature=0),
        None,
    ),
    "own code in chat": (
        "/v1/chat/completions",
        {**CHAT, **own_code("ForceToken", token_id=70), "max_tokens": 5, "return_token_ids": True},
        lambda reply: reply["choices"][0]["token_ids"] == [70] * 5,
    ),
}


@pytest.fixture(scope="module", params=DEPLOYMENTS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compilation_cache: str
) -> Iterator[LiveServer]:
    words = [word for name, value in OPTIONS.items() for word in (f"--{name}", value) if word is not None]
    log: Path = tmp_path_factory.mktemp("everything") / "server.log"
    options = ["--model-path", demo_model_path(), "--compilation-cache-dir", compilation_cache, *words]
    options += request.param.options
    with running(log, *options, env=environment(), num_hosts=request.param.num_hosts) as live:
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


def test_embeddings_are_the_ids_they_belong_to(server: LiveServer) -> None:
    greedy = {**SAMPLING, "temperature": 0}
    for fields in ({}, {"regex": "(ab|cd)+ [a-z]{9}"}, {"presence_penalty": 1.5, "stop": ["e"]}):
        sampling = {**greedy, **fields}
        expected = server.generate(input_ids=IDS, sampling_params=sampling)
        found = server.generate(input_embeds=EMBEDS, sampling_params=sampling)
        assert (found["text"], found["output_ids"]) == (expected["text"], expected["output_ids"])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"input_embeds": [row[1:] for row in EMBEDS]}, "input_embeds[0] must have"),
        ({"input_embeds": EMBEDS, "text": "a"}, "Exactly one of text, input_ids and input_embeds"),
        ({"input_embeds": EMBEDS, "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len must be -1 or"),
        ({"input_embeds": [[0]] * 9000}, "is longer than the model's context length"),
    ],
)
def test_embeddings_that_are_refused(server: LiveServer, fields: dict[str, Any], sentence: str) -> None:
    reply = server.post("/generate", fields)
    assert reply.status_code == 400 and sentence in reply.json()["error"]["message"]
    server.assert_whole()


@pytest.mark.parametrize(
    ("name", "said"),
    [("Raises", "no such luck"), ("Loops", "took too long"), ("Exits", "ended the process"), ("Nothing", "No token is left")],
)
def test_code_that_fails_ends_its_request_alone(server: LiveServer, name: str, said: str) -> None:
    good = native({"input_ids": IDS}, own_code("AddBias", step=3), max_new_tokens=40)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        others = [pool.submit(server.generate, **good), pool.submit(ask, server, "regex"), pool.submit(ask, server, "own code")]
        reply = server.post("/generate", native({"input_ids": IDS}, own_code(name)))
        assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text
        expected = [((n + 1) * 3 + len(IDS)) % VOCAB_SIZE for n in range(40)]
        assert others[0].result()["output_ids"] == expected
        for other in others[1:]:
            other.result()
    server.assert_whole()


def test_code_that_changes_nothing_changes_nothing(server: LiveServer) -> None:
    plain = server.generate(**REQUESTS["greedy"][1])
    assert server.generate(**REQUESTS["own code that changes nothing"][1])["output_ids"] == plain["output_ids"]


def test_streamed(server: LiveServer) -> None:
    for name in ("logprobs", "hidden states", "completion", "chat", "tool"):
        path, body, _ = REQUESTS[name]
        assert list(server.stream(path, {**body, "stream": True})), name
    server.assert_whole()
