"""The `anthropic` and `ollama` packages, and `openai` for responses, against a live server with the demo model."""

from __future__ import annotations

import json

import anthropic
import ollama
import openai
import pytest
from live_server import LiveServer

from jaxserve.demo import demo_model_path

QUESTION = [{"role": "user", "content": "What is jaxserve?"}]
MODEL = demo_model_path()
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def claude(demo_server: LiveServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=demo_server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llama(demo_server: LiveServer) -> ollama.Client:
    return ollama.Client(demo_server.url)


def greedy(server: LiveServer) -> str:
    reply = server.post("/v1/chat/completions", {"messages": QUESTION, "temperature": 0, "max_tokens": 24})
    return str(reply.json()["choices"][0]["message"]["content"])


def test_a_message_is_what_a_chat_completion_says(demo_server: LiveServer, claude: anthropic.Anthropic) -> None:
    text, body = greedy(demo_server), {"temperature": 0}
    message = claude.messages.create(model=MODEL, max_tokens=24, messages=QUESTION, extra_body=body)
    assert [block.text for block in message.content] == [text]
    with claude.messages.stream(model=MODEL, max_tokens=24, messages=QUESTION, extra_body=body) as stream:
        assert "".join(stream.text_stream) == text
        streamed = stream.get_final_message()
    assert streamed.stop_reason == message.stop_reason
    counted = claude.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    for usage in (message.usage, streamed.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == counted
        assert usage.output_tokens == message.usage.output_tokens


def test_more_tokens_than_the_context_holds_are_no_error(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(model=MODEL, max_tokens=20_000, messages=QUESTION, stop_sequences=["e"])
    assert message.stop_reason in ("stop_sequence", "end_turn")


def test_a_response_goes_on(demo_server: LiveServer) -> None:
    client = openai.OpenAI(base_url=demo_server.url + "/v1", api_key="none", max_retries=0)
    text, asked = greedy(demo_server), QUESTION[0]["content"]
    first = client.responses.create(model=MODEL, input=asked, max_output_tokens=24, temperature=0)
    assert first.output_text == text
    stream = client.responses.create(model=MODEL, input=asked, max_output_tokens=24, temperature=0, stream=True)
    assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == text
    second = client.responses.create(
        model=MODEL, input="And?", previous_response_id=first.id, max_output_tokens=8, temperature=0, background=True
    )
    messages = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    reply = demo_server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 8}).json()
    while second.status in ("queued", "in_progress"):
        second = client.responses.retrieve(second.id)
    assert second.output_text == reply["choices"][0]["message"]["content"]
    running = client.responses.create(model=MODEL, input=asked, background=True, temperature=1)
    client.responses.delete(running.id)
    demo_server.assert_whole()


def test_ollama_says_what_a_chat_completion_says(demo_server: LiveServer, llama: ollama.Client) -> None:
    text, options = greedy(demo_server), {"temperature": 0, "num_predict": 24}
    reply = llama.chat(MODEL, QUESTION, options=options)
    assert reply.message.content == text
    assert reply.total_duration > 0
    assert reply.total_duration == pytest.approx(reply.prompt_eval_duration + reply.eval_duration, abs=2)
    assert "".join(part.message.content for part in llama.chat(MODEL, QUESTION, options=options, stream=True)) == text
    assert llama.generate(MODEL, QUESTION[0]["content"], options=options).response == text
    raw = demo_server.post("/v1/completions", {"prompt": "one two", "temperature": 0, "max_tokens": 8}).json()
    assert (
        llama.generate(MODEL, "one two", raw=True, options={**options, "num_predict": 8}).response == raw["choices"][0]["text"]
    )


def test_schemas_hold(claude: anthropic.Anthropic, llama: ollama.Client) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = claude.messages.create(model=MODEL, max_tokens=60, messages=QUESTION, output_config=form)
    replies = [message.content[0].text, llama.chat(MODEL, QUESTION, format=SCHEMA, options={"num_predict": 60}).message.content]
    assert all(isinstance(json.loads(reply)["n"], int) for reply in replies)


def test_clients_that_leave_cost_no_memory(demo_server: LiveServer, claude: anthropic.Anthropic, llama: ollama.Client) -> None:
    for _ in range(3):
        with claude.messages.create(model=MODEL, max_tokens=1500, messages=QUESTION, stream=True) as stream:
            assert next(iter(stream)).type == "message_start"
        parts = llama.generate(MODEL, "one two", raw=True, stream=True)
        assert not next(parts).done
        parts.close()
    demo_server.assert_whole()
