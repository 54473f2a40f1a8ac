"""What each API is sent, and what its events say."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.bench.serving.apis import Reading, body_of, next_content
from jaxserve.bench.serving.work import Load, Outcome, Task

SCHEMA = {"type": "object"}


def load(api: str, **changes: Any) -> Load:
    values: dict[str, Any] = {
        "api": api, "url": "", "model": "m", "headers": {}, "temperature": 0.0, "top_p": 0.9, "ignore_eos": True,
        "stream": True, "wants_cached": False, "incremental": False, "extra_body": {}, "timeout_s": 1.0,
        "num_processes": 1, "max_concurrency": None,
    }  # fmt: skip
    return Load(**(values | changes))


def body(api: str, task: Task, **changes: Any) -> dict[str, Any]:
    return body_of(load(api, **changes), task, task.turns[0])


def test_schemas_go_where_each_api_has_them() -> None:
    task = Task(turns=["Hello"], prompt_len=1, output_len=5, schema=SCHEMA)
    sampling = body("native", task)["sampling_params"]
    assert (json.loads(sampling["json_schema"]), sampling["ignore_eos"], sampling["top_p"]) == (SCHEMA, False, 0.9)
    for api in ("completions", "chat"):
        sent = body(api, task)
        assert (sent["response_format"]["json_schema"]["schema"], sent["ignore_eos"]) == (SCHEMA, False)


def test_token_ids_and_messages() -> None:
    task = Task(turns=[[5, 6]], prompt_len=2, output_len=5)
    assert body("native", task)["input_ids"] == body("completions", task)["prompt"] == [5, 6]
    told = body("chat", Task(turns=["Hello"], prompt_len=1, output_len=5), wants_cached=True)
    assert (told["messages"], told["max_completion_tokens"]) == ([{"role": "user", "content": "Hello"}], 5)
    assert told["return_cached_tokens_details"]
    assert next_content("Hello", " you", "And?") == "Hello you\n\nAnd?"


def test_adapters_are_named_as_each_server_knows_them() -> None:
    task = Task(turns=["Hello"], prompt_len=1, output_len=5, lora_name="sql")
    assert body("native", task)["lora_path"] == "sql"
    for api in ("completions", "chat"):
        assert {name: body(api, task)[name] for name in ("model", "lora_path")} == {"model": "sql", "lora_path": "sql"}
    assert "lora_path" not in body("native", Task(turns=["Hello"], prompt_len=1, output_len=5))


def test_fields_of_the_users_own_are_added_or_win() -> None:
    task = Task(turns=["Hello"], prompt_len=1, output_len=5)
    sent = body("completions", task, extra_body={"stream_options": {"continuous_usage_stats": True}, "max_tokens": 9})
    assert sent["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert sent["max_tokens"] == 9


def test_native_streams_that_bring_new_text_only() -> None:
    texts = {}
    for incremental, events in ((False, ["a", "ab"]), (True, ["a", "b"])):
        outcome = Outcome(task=0, turn=0, start_s=0.0)
        reading = Reading(load("native", incremental=incremental), outcome)
        for number, text in enumerate(events, 1):
            reading.take(json.dumps({"text": text, "meta_info": {"completion_tokens": number}}).encode(), float(number))
        reading.end()
        texts[incremental] = outcome.text
        assert (outcome.times_s, outcome.tokens) == ([1.0, 2.0], [1, 1])
    assert texts == {False: "ab", True: "ab"}


def test_a_first_token_without_text_is_a_token() -> None:
    """Half a character: /generate counts it, so it is the first token that was heard of."""
    outcome = Outcome(task=0, turn=0, start_s=0.0)
    reading = Reading(load("native"), outcome)
    for number, text in enumerate(["", "é"], 1):
        reading.take(json.dumps({"text": text, "meta_info": {"completion_tokens": number}}).encode(), float(number))
    assert outcome.times_s == [1.0, 2.0]
