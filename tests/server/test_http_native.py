"""POST /generate: SGLang's shapes, streamed and not."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from fake_service import FakeService
from http_harness import app_client, events_of

from jaxserve.types import FinishReason


async def test_a_reply_has_text_ids_and_meta_info() -> None:
    async with app_client(FakeService(), weight_version="v7") as client:
        reply = await client.post("/generate", json={"text": "hi", "sampling_params": {"max_new_tokens": 3}, "rid": "r"})
    assert reply.status_code == 200
    assert reply.json() == {
        "text": "abc",
        "output_ids": [97, 98, 99],
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "cached_tokens": 3,
            "cached_tokens_details": {"device": 3, "host": 0},
            "reasoning_tokens": 0,
            "weight_version": "v7",
            "e2e_latency": 0.25,
        },
    }


async def test_tokens_of_thinking_are_counted() -> None:
    fake = FakeService()
    fake.thinking_end = "c"
    body = {"text": "hi", "require_reasoning": True, "sampling_params": {"max_new_tokens": 5}}
    async with app_client(fake) as client:
        reply = await client.post("/generate", json=body)
        events = events_of((await client.post("/generate", json={**body, "stream": True})).text)
    assert (reply.json()["text"], reply.json()["meta_info"]["reasoning_tokens"]) == ("abcde", 3)
    assert [one["meta_info"]["reasoning_tokens"] for one in events] == [1, 2, 3, 3, 3]


async def test_put_is_accepted_and_the_content_type_is_not_looked_at() -> None:
    async with app_client(FakeService()) as client:
        reply = await client.put("/generate", json={"text": "hi"})
    assert reply.status_code == 200


async def test_lists_and_samples_answer_with_a_list() -> None:
    body = {"input_ids": [[5, 6], [7]], "sampling_params": {"max_new_tokens": 1, "n": 2}}
    async with app_client(FakeService()) as client:
        replies = (await client.post("/generate", json=body)).json()
    assert [one["meta_info"]["prompt_tokens"] for one in replies] == [2, 2, 1, 1]
    assert all("index" not in one for one in replies)


async def test_a_stream_repeats_all_text_so_far() -> None:
    async with app_client(FakeService()) as client:
        reply = await client.post("/generate", json={"text": "hi", "sampling_params": {"max_new_tokens": 3}, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in reply.headers
    events = events_of(reply.text)
    assert [one["text"] for one in events] == ["a", "ab", "abc"]
    assert [one["meta_info"]["finish_reason"] for one in events] == [None, None, {"type": "length", "length": 3}]
    assert all("index" not in one for one in events)


async def test_incremental_streams_send_what_is_new() -> None:
    async with app_client(FakeService(), incremental_streaming_output=True) as client:
        body = {"text": ["x", "y"], "sampling_params": {"max_new_tokens": 2}, "stream": True}
        events = events_of((await client.post("/generate", json=body)).text)
    assert [(one["index"], one["text"], one["output_ids"]) for one in events] == [
        (0, "a", [97]),
        (1, "a", [97]),
        (0, "b", [98]),
        (1, "b", [98]),
    ]


async def test_logprobs_with_text() -> None:
    body = {
        "text": "hi",
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    async with app_client(FakeService()) as client:
        meta = (await client.post("/generate", json=body)).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 97, "a"], [-0.5, 98, "b"]]
    assert meta["output_top_logprobs"][1] == [[-0.5, 98, "b"], [-1.5, 122, "z"]]


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_reply_tells_of_the_prompt(stream: bool, incremental: bool) -> None:
    body = {
        "text": ["hi", "ho"],
        "sampling_params": {"max_new_tokens": 3},
        "return_logprob": True,
        "top_logprobs_num": [1, 0],
        "logprob_start_len": 0,
        "token_ids_logprob": [[7, 8], None],
        "return_text_in_logprobs": True,
        "return_prompt_token_ids": True,
        "return_hidden_states": [True, "last"],
        "return_routed_experts": [False, True],
        "stream": stream,
    }
    service = FakeService()
    service.step_s = 0.02  # chunks that wait are merged
    async with app_client(service, incremental_streaming_output=incremental) as client:
        reply = await client.post("/generate", json=body)
    replies = events_of(reply.text) if stream else reply.json()
    for index, ids in enumerate(([1, 104, 105], [1, 104, 111])):
        mine = [one for at, one in enumerate(replies) if one.get("index", at) == index]
        assert all(one["prompt_token_ids"] == ids for one in mine)
        metas = [one["meta_info"] for one in mine]
        shown = [meta["input_token_logprobs"] for meta in metas]
        expected = [[None, 1, "<s>"], [-1.0, ids[1], "h"], [-1.0, ids[2], chr(ids[2])]]
        assert shown == ([expected, [], []] if stream and incremental else [expected] * len(mine))
        assert [meta["output_token_logprobs_length"] for meta in metas] == ([1, 2, 3] if stream else [3])
        assert ["hidden_states" in meta for meta in metas] == [False] * (len(metas) - 1) + [True]
        assert metas[-1]["hidden_states"] == ([[[1.0, 0.5]], [2.0, 0.5], [3.0, 0.5]] if index == 0 else [3.0, 0.5])
        assert ["routed_experts" in meta for meta in metas] == [False] * (len(metas) - 1) + [index == 1]
        if index == 1:
            experts = np.frombuffer(base64.b64decode(metas[-1]["routed_experts"]), "<i4").reshape(3, 2, 3)
            assert experts[:, 0, 0].tolist() == [1, 2, 3]
        top = [[[-0.75, 1, "<s>"]]] * 2
        assert metas[0].get("input_top_logprobs") == ([None, *top] if index == 0 else None)
        of_ids = [[-3.0, 7, chr(7)], [-3.0, 8, chr(8)]]
        assert metas[0].get("input_token_ids_logprobs") == ([None, of_ids, of_ids] if index == 0 else None)
        assert ("output_token_ids_logprobs" in metas[0]) == (index == 0)


async def test_input_logprobs_are_empty_unless_asked_for() -> None:
    body = {"text": "hi", "return_logprob": True, "sampling_params": {"max_new_tokens": 2}}
    async with app_client(FakeService()) as client:
        meta = (await client.post("/generate", json=body)).json()["meta_info"]
    assert meta["input_token_logprobs"] == [] and meta["output_token_logprobs_length"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_of_a_batch_ask_for_different_things(stream: bool) -> None:
    body = {
        "text": ["a", "b", "c"],
        "sampling_params": {"max_new_tokens": 1, "n": 2},
        "return_logprob": [True, False, True],
        "top_logprobs_num": [2, 2, 0],
        "stream": stream,
    }
    async with app_client(FakeService()) as client:
        reply = await client.post("/generate", json=body)
    replies = sorted(events_of(reply.text), key=lambda one: one["index"]) if stream else reply.json()
    metas = [one["meta_info"] for one in replies]
    assert ["output_token_logprobs" in meta for meta in metas] == [True, True, False, False, True, True]
    assert ["output_top_logprobs" in meta for meta in metas] == [True, True, False, False, False, False]


async def test_preferred_sampling_params_fill_what_is_left_out() -> None:
    async with app_client(FakeService(), preferred_sampling_params='{"max_new_tokens": 2, "temperature": 0.5}') as client:
        one = (await client.post("/generate", json={"text": "x"})).json()
        two = (await client.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 1}})).json()
    assert (one["text"], two["text"]) == ("ab", "a")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "text, input_ids and input_embeds"),
        ({"text": "a", "input_ids": [1]}, "text, input_ids and input_embeds"),
        ({"text": "a", "sampling_params": {"max_new_tokenz": 1}}, "max_new_tokenz"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "return_logprob": [True, True]}, "return_logprob"),
        ({"text": "x" * 200}, "tokens"),
    ],
)
async def test_bad_requests_are_400_with_the_field(body: dict[str, object], message: str, stream: bool) -> None:
    async with app_client(FakeService()) as client:
        reply = await client.post("/generate", json={**body, "stream": stream})
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/json"
    assert message in reply.json()["error"]["message"]


async def test_a_failure_before_the_first_token_has_its_status_also_when_streaming() -> None:
    service = FakeService()
    service.fail_after = (1, FinishReason.abort("The request queue is full.", 503, "ServiceUnavailableError"))
    async with app_client(service) as client:
        for stream in (False, True):
            reply = await client.post("/generate", json={"text": "x", "stream": stream})
            assert reply.status_code == 503
            assert reply.json()["error"]["message"] == "The request queue is full."


async def test_a_failure_later_is_an_event_and_done() -> None:
    service = FakeService()
    service.fail_after = (3, FinishReason.abort("Ran too long.", 503))
    async with app_client(service) as client:
        reply = await client.post("/generate", json={"text": "x", "stream": True})
        whole = await client.post("/generate", json={"text": "x"})
    assert reply.status_code == 200
    events = events_of(reply.text)
    assert [one.get("text") for one in events] == ["a", "ab", None]
    assert events[-1]["error"]["message"] == "Ran too long."
    assert whole.status_code == 503


async def test_an_abort_somebody_asked_for_is_an_ordinary_end() -> None:
    service = FakeService()
    service.fail_after = (2, FinishReason.abort("The request was aborted."))
    async with app_client(service) as client:
        reply = await client.post("/generate", json={"text": "x"})
    assert reply.status_code == 200
    assert reply.json()["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unexpected_error_hides_its_details(stream: bool) -> None:
    service = FakeService()
    service.crash = KeyError("secret detail")
    async with app_client(service) as client:
        reply = await client.post("/generate", json={"text": "x", "stream": stream})
    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert "Internal server error" in reply.json()["error"]["message"]
