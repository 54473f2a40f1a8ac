"""The `openai` package against a live server with the demo model: what its users call, and what they get when it goes wrong."""

from __future__ import annotations

import concurrent.futures
import re

import openai
import pytest
from live_server import LiveServer

from jaxserve.demo import demo_model_path

QUESTION = [{"role": "user", "content": "What is jaxserve?"}]
MODEL = demo_model_path()


@pytest.fixture(scope="module")
def client(demo_server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=demo_server.url + "/v1", api_key="none", max_retries=0, timeout=120)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.model_dump()["max_model_len"] == 2048
    assert client.models.retrieve(MODEL).id == MODEL


def test_completion_and_its_usage(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="one two three", max_tokens=8, temperature=0)
    (choice,) = reply.choices
    assert choice.text
    assert choice.finish_reason in ("length", "stop")
    assert reply.usage is not None
    assert reply.usage.completion_tokens <= 8
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_completions_of_many_prompts_and_samples(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt=["a", "b c", "d"], n=2, max_tokens=5, temperature=1, seed=3)
    assert [choice.index for choice in reply.choices] == list(range(6))
    again = client.completions.create(model=MODEL, prompt=["a", "b c", "d"], n=2, max_tokens=5, temperature=1, seed=3)
    assert [choice.text for choice in again.choices] == [choice.text for choice in reply.choices]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="one two", max_tokens=4, temperature=0, logprobs=2, echo=False)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens).startswith(reply.choices[0].text[:1])
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert logprob is not None
        assert logprob <= 0
        assert max(top.values()) == pytest.approx(logprob)
        assert token in top


def test_streamed_completion_adds_up(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="one two", max_tokens=20, temperature=0)
    stream = client.completions.create(
        model=MODEL, prompt="one two", max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "stop"


def test_streamed_chat_adds_up_and_ends_with_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert reasons == ["stop"]
    assert not chunks[-1].choices
    assert chunks[-1].usage == whole.usage


def test_chat_logprobs_and_several_choices(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, n=3, temperature=1, seed=1, max_tokens=6, logprobs=True, top_logprobs=4
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    for choice in reply.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
        for token in choice.logprobs.content:
            assert token.logprob <= 0
            assert len(token.top_logprobs) == 4
            assert bytes(token.bytes or []).decode(errors="replace") == token.token


def test_stop_ends_and_is_not_part_of_the_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="one two", max_tokens=30, temperature=0).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    cut = client.completions.create(model=MODEL, prompt="one two", max_tokens=30, temperature=0, stop=[stop])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    streamed = client.completions.create(model=MODEL, prompt="one two", max_tokens=30, temperature=0, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.choices[0].text


def test_a_stop_pattern_cuts_streamed_and_whole_text_alike(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "prompt": "one two", "max_tokens": 30, "temperature": 0}
    text = client.completions.create(**request).choices[0].text
    start = len(text) // 2
    pattern = re.escape(text[start]) + ".{3}" + re.escape(text[start + 4])
    first = min((m.end(), m.start()) for i in range(len(text)) if (m := re.compile(f"(?s){pattern}").match(text, i)))
    cut = client.completions.create(**request, extra_body={"stop_regex": f"(?s){pattern}"}).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: first[1]], "stop")
    streamed = client.completions.create(**request, extra_body={"stop_regex": f"(?s){pattern}"}, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.text
    with pytest.raises(openai.BadRequestError, match="a back reference, which is not supported"):
        client.completions.create(**request, extra_body={"stop_regex": r"(a)\1"})


def test_fields_nobody_serves_are_named(client: openai.OpenAI) -> None:
    for field in ("no_such_field", "lora_path", "web_search_options"):
        with pytest.raises(openai.BadRequestError, match=field):
            client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={field: {"a": 1}})
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[tool])
    client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=1,
        tools=[tool],
        tool_choice="none",
        user="u",
        metadata={"a": "b"},
    )


def test_logit_bias_and_max_completion_tokens(client: openai.OpenAI) -> None:
    token = client.completions.create(model=MODEL, prompt="x", max_tokens=1, logprobs=1).model_dump()
    assert token["choices"][0]["logprobs"]
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_completion_tokens=3, temperature=0, logit_bias={"65": 100}
    )
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3
    assert len(set(reply.choices[0].message.content or "")) == 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "100"),
        ({"n": 0}, "n"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"temperature": "hot"}, "temperature"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
    ],
)
def test_bad_fields_are_400_and_named(client: openai.OpenAI, fields: dict, named: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=QUESTION, **fields)
    assert named in caught.value.message


def test_unknown_model_and_empty_messages(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model") as missing:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.chat.completions.create(model=MODEL, messages=[])


def test_many_chats_at_once_agree_with_one(client: openai.OpenAI, demo_server: LiveServer) -> None:
    def answer(_: int) -> str:
        reply = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
        return reply.choices[0].message.content or ""

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(answer, range(32)))) == 1
    demo_server.assert_whole()


async def test_the_async_client_streams(demo_server: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=demo_server.url + "/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert len(pieces) > 2
