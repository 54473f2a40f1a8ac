"""POST /v1/completions: OpenAI's shapes with SGLang's extensions."""

from __future__ import annotations

from typing import Any

import pytest
from fake_service import FakeService
from http_harness import MODEL, app_client, events_of


async def complete(service: FakeService | None = None, /, expect: int = 200, options: Any = None, **body: Any) -> Any:
    async with app_client(service or FakeService(), **(options or {})) as client:
        reply = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, **body})
    assert reply.status_code == expect, reply.text
    return events_of(reply.text) if expect == 200 and body.get("stream") else reply.json()


async def test_a_reply() -> None:
    reply = await complete(rid="r")
    assert reply["object"] == "text_completion"
    assert (reply["id"], reply["model"]) == ("r", MODEL)
    assert reply["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length", "matched_stop": None}]
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": None,
        "completion_tokens_details": {"reasoning_tokens": 0},
        "reasoning_tokens": 0,
    }


async def test_sixteen_tokens_by_default() -> None:
    assert len((await complete(max_tokens=None))["choices"][0]["text"]) == 16


@pytest.mark.parametrize(
    ("prompt", "texts", "ids"),
    [
        ("hi", ["hi"], None),
        (["hi", "yo"], ["hi", "yo"], None),
        ([5, 6], None, [[5, 6]]),
        ([[5], [6, 7]], None, [[5], [6, 7]]),
    ],
)
async def test_forms_of_a_prompt(prompt: Any, texts: Any, ids: Any) -> None:
    service = FakeService()
    reply = await complete(service, prompt=prompt, n=2)
    assert (service.requests[0].prompts, service.requests[0].input_ids) == (texts, ids)
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * len(texts or ids)))


async def test_usage_counts_a_prompt_once_for_all_its_samples() -> None:
    reply = await complete(prompt=["hi", "you"], n=2, options={"enable_cache_report": True})
    assert reply["usage"]["prompt_tokens"] == 3 + 4
    assert reply["usage"]["completion_tokens"] == 12
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


async def test_stop_and_matched_stop() -> None:
    choice = (await complete(stop="b"))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("a", "stop", "b")
    choice = (await complete(stop_token_ids=[99]))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("ab", "stop", 99)


async def test_logprobs() -> None:
    logprobs = (await complete(logprobs=2))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "z": -1.5}
    assert logprobs["text_offset"] == [0, 1, 2]
    assert (await complete(logprobs=0))["choices"][0]["logprobs"]["top_logprobs"] is None


async def test_echo_repeats_the_prompt() -> None:
    assert (await complete(echo=True))["choices"][0]["text"] == "hiabc"
    assert (await complete(echo=True, prompt=[104, 105]))["choices"][0]["text"] == "hiabc"
    events = await complete(echo=True, stream=True, prompt=["x", "y"])
    assert "".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == 1) == "yabc"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_begins_with_those_of_the_prompt(stream: bool) -> None:
    reply = await complete(echo=True, logprobs=1, stream=stream, max_tokens=2)
    choices = [event["choices"][0] for event in reply] if stream else reply["choices"]
    columns: dict[str, list[Any]] = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    for choice in choices:
        for name, column in columns.items():
            column.extend(choice["logprobs"][name])
    assert "".join(choice["text"] for choice in choices) == "hiab"
    assert columns["tokens"] == ["<s>", "h", "i", "a", "b"]
    assert columns["token_logprobs"] == [None, -1.0, -1.0, -0.5, -0.5]
    assert columns["top_logprobs"] == [None, {"<s>": -0.75}, {"<s>": -0.75}, {"a": -0.5}, {"b": -0.5}]
    assert columns["text_offset"] == [0, 3, 4, 5, 6]


async def test_a_stream() -> None:
    events = await complete(stream=True, n=2, logprobs=1, return_token_ids=True)
    assert {event["object"] for event in events} == {"text_completion"}
    assert len({event["id"] for event in events}) == 1
    first = [event["choices"][0] for event in events if event["choices"][0]["index"] == 0]
    assert [c["text"] for c in first] == ["a", "b", "c"]
    assert [c["finish_reason"] for c in first] == [None, None, "length"]
    assert [c["logprobs"]["text_offset"] for c in first] == [[0], [1], [2]]
    assert [c["token_ids"] for c in first] == [[97], [98], [99]]
    assert all("usage" not in event for event in events)


async def test_streamed_usage() -> None:
    events = await complete(stream=True, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == 6
    events = await complete(stream=True, stream_options={"continuous_usage_stats": True})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3]
    by_default = {"stream_response_default_include_usage": True}
    assert (await complete(stream=True, options=by_default))[-1]["choices"] == []
    declined = await complete(stream=True, options=by_default, stream_options={"include_usage": False})
    assert declined[-1]["choices"] != []


async def test_every_sampling_field_arrives() -> None:
    service = FakeService()
    await complete(
        service,
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, frequency_penalty=0.2,
        presence_penalty=0.3, seed=7, min_tokens=1, stop=["q", "r"], stop_token_ids=[500], stop_regex="x+",
        logit_bias={"9": -3}, no_stop_trim=True, ignore_eos=True, skip_special_tokens=False,
        spaces_between_special_tokens=False,
        priority=4, extra_key="k", cache_salt="s",
    )  # fmt: skip
    request = service.requests[0]
    params = request.sampling_params[0]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.1, 0.2, 0.3)
    assert (params.sampling_seed, params.min_new_tokens, params.max_new_tokens) == (7, 1, 3)
    assert (params.stop, params.stop_token_ids, params.stop_regex) == (["q", "r"], [500], ["x+"])
    assert params.logit_bias == {9: -3}
    assert (params.no_stop_trim, params.ignore_eos) == (True, True)
    assert (params.skip_special_tokens, params.spaces_between_special_tokens) == (False, False)
    assert (request.options[0].priority, request.options[0].extra_key, request.options[0].cache_salt) == (4, "k", "s")


async def test_the_models_defaults_are_for_chat_only() -> None:
    service = FakeService()
    service.generation_defaults = {"temperature": 0.1}
    await complete(service)
    assert service.requests[0].sampling_params[0].temperature == 1.0


async def test_request_ids() -> None:
    service = FakeService()
    reply = await complete(service, prompt=["a", "b"])
    assert service.requests[-1].rids == [f"{reply['id']}_0", f"{reply['id']}_1"]
    await complete(service, prompt=["a", "b"], rid=["x", "y"])
    assert service.requests[-1].rids == ["x", "y"]
    error = await complete(service, prompt=["a", "b"], rid=["x", "y", "z"], expect=400)
    assert error["param"] == "rid"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": None}, "prompt", "must be a string or a list, got null"),
        ({"prompt": []}, "prompt", "got []"),
        ({"prompt": ["a", 1]}, "prompt", "mix"),
        ({"prompt": [1.5]}, "prompt", "prompt[0] must be an integer or a string or a list"),
        ({"prompt": [5, -1], "echo": True}, "prompt", "[0, 1000), got -1"),
        ({"prompt": [[5], [1000]]}, "prompt", "[0, 1000), got 1000"),
        ({"max_tokens": -1}, "max_tokens", "at least 0, got -1"),
        ({"max_tokens": "ten"}, "max_tokens", 'must be an integer or null, got "ten"'),
        ({"max_tokens": 1 << 40}, "max_tokens", "<= 2147483647, got 1099511627776"),
        ({"n": 0}, "n", "in [1, 128], got 0"),
        ({"n": 129}, "n", "in [1, 128], got 129"),
        ({"temperature": -1}, "temperature", "non-negative and finite, got -1"),
        ({"top_p": 0}, "top_p", "in (0, 1], got 0"),
        ({"top_k": 0}, "top_k", "at least 1, got 0"),
        ({"frequency_penalty": 3}, "frequency_penalty", "in [-2, 2], got 3"),
        ({"min_tokens": 4}, "min_tokens", "in [0, max_tokens=3], got 4"),
        ({"seed": 1 << 63}, "seed", "got 9223372036854775808"),
        ({"stop": [""]}, "stop", "empty string"),
        ({"stop": ["a"] * 33}, "stop", "at most 32 entries, got 33"),
        ({"stop_token_ids": [1000]}, "stop_token_ids", "[0, 1000), got 1000"),
        ({"logit_bias": {"x": 1}}, "logit_bias", 'got "x"'),
        ({"logit_bias": {"1000": 1}}, "logit_bias", "[0, 1000), got 1000"),
        ({"logprobs": 21}, "logprobs", "in [0, 20], got 21"),
        ({"best_of": 1, "n": 2}, "best_of", "in [n=2, 128], got 1"),
        ({"best_of": 129}, "best_of", "in [n=1, 128], got 129"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"suffix": "end"}, "suffix", "no tokens for filling in the middle"),
        ({"suffix": "end", "prompt": [5]}, "suffix", "needs prompts of text"),
        ({"lora_path": ["x", "y"]}, "lora_path", "one entry per prompt: got 2 for 1 prompts"),
        ({"session_params": {"name": "x"}}, "session_params.name", "not a field"),
        ({"custom_logit_processor": 3}, "custom_logit_processor", "must be"),
        ({"return_hidden_states": "first"}, "return_hidden_states", "return_hidden_states"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "must be true or false"),
        ({"rid": ["a", "b"]}, "rid", "one string"),
        ({"rid": ""}, "rid", "at least one character"),
        ({"brand_new_field": {"x": 1}}, "brand_new_field", "brand_new_field is not a field this server knows."),
        ({"data_parallel_rank": True}, "data_parallel_rank", "must be an integer or null"),
        ({"routed_dp_rank": "0"}, "routed_dp_rank", "must be an integer or null"),
        ({"routed_dp_rank": 0, "data_parallel_rank": 1}, "routed_dp_rank", "must not differ; got 0 and 1."),
        ({"mm_processor_kwargs": {"x": 1}}, "mm_processor_kwargs", "not supported yet"),
        ({"images_config": {"x": "y"}}, "images_config", "not supported yet"),
        ({"stop_regex": "a" * 257}, "stop_regex", "at most 256 bytes"),
    ],
)  # fmt: skip
async def test_bad_fields_are_named(body: dict[str, Any], param: str, words: str) -> None:
    error = await complete(expect=400, **body)
    assert error["object"] == "error"
    assert words in error["message"]
    assert error["param"] == param
    assert error["error"]["message"] == error["message"]


async def test_what_asks_for_nothing_is_accepted() -> None:
    await complete(
        suffix=None, best_of=1, response_format={"type": "text"}, lora_path=None, json_schema="", return_hidden_states=False,
        user="u", store=False, temperature=None, stop=None, stream_options=None,
    )  # fmt: skip
