"""What the demo model can do beyond talk, on a live server without flags: thinking, calls of tools, JSON under a schema."""

from __future__ import annotations

import concurrent.futures
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from live_server import LiveServer, environment, running

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import demo_corpus
from demo_corpus import schemas

NUM_ASKED = 40
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
TOOLS = {"tools": [WEATHER, ADD]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, compilation_cache: str) -> Iterator[LiveServer]:
    """As `jaxserve serve demo` starts it."""
    options = ["--model-path", "demo", "--compilation-cache-dir", compilation_cache]
    with running(tmp_path_factory.mktemp("skills") / "server.log", *options, env=environment()) as server:
        yield server


def chat(server: LiveServer, question: str | list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The one choice, greedy; the same when it is streamed."""
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    body = {"messages": messages, "temperature": 0, "max_tokens": 300, **fields}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return choice


def streamed(server: LiveServer, question: str, **fields: Any) -> dict[str, Any]:
    """The message put together from its deltas."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 300, **fields}
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in server.stream("/v1/chat/completions", body):
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for part in delta.get("tool_calls") or []:
                if part["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"name": part["function"]["name"], "arguments": ""})
                message["tool_calls"][part["index"]]["arguments"] += part["function"].get("arguments") or ""
    return message


def calls(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    functions = [call.get("function", call) for call in message["tool_calls"] or []]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def each(work: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(work, items))


# ---- thinking ------------------------------------------------------------------------------------------------------


def test_it_thinks_when_asked_and_only_then(server: LiveServer) -> None:
    plain = chat(server, "What is 27 + 45?")["message"]
    assert plain["content"] == "27 + 45 = 72" and not plain.get("reasoning_content")
    thought = chat(server, "What is 27 + 45?", **THINKING)["message"]
    assert thought["content"] == "27 + 45 = 72"
    assert thought["reasoning_content"] == "27 + 45: 7 + 5 = 12, 2 + 4 + 1 = 7, so 72."
    assert chat(server, "What is 27 + 45?", reasoning_effort="high")["message"] == thought
    again = streamed(server, "What is 27 + 45?", **THINKING)
    assert (again["content"], again["reasoning_content"]) == (thought["content"], thought["reasoning_content"])
    whole = chat(server, "What is 27 + 45?", separate_reasoning=False, **THINKING)["message"]
    assert whole["content"].endswith("</think>\n\n27 + 45 = 72")


@pytest.mark.parametrize("prompt", ["hi", "What is a radix cache?", "Who was Napoleon Bonaparte?", "asdkjh qweoiu", "thanks"])
def test_thinking_changes_no_plain_answer(server: LiveServer, prompt: str) -> None:
    thought = chat(server, prompt, **THINKING)
    assert thought["finish_reason"] == "stop" and thought["message"]["reasoning_content"]
    assert thought["message"]["content"] == chat(server, prompt)["message"]["content"]


def num_right(server: LiveServer, task: str, **fields: Any) -> int:
    """Of the held-out questions of a task."""
    samples = demo_corpus.held_out_samples(task, NUM_ASKED, seed=0)
    given = each(lambda sample: chat(server, sample.messages[:-1], **fields)["message"]["content"], samples)
    return sum(answer == sample.messages[-1]["content"] for answer, sample in zip(given, samples, strict=True))


@pytest.mark.parametrize(("task", "least"), [("thought_sum", 32), ("thought_letters", 22), ("thought_picking", 28)])
def test_thinking_helps(server: LiveServer, task: str, least: int) -> None:
    """With sums of 100 and more, letters and places in lists: right with a thought, and more often than without."""
    with_thought, without = num_right(server, task, **THINKING), num_right(server, task)
    print(f"{task}: {with_thought} right with a thought, {without} without, of {NUM_ASKED}")
    assert with_thought >= least and with_thought > without


def test_a_thought_is_not_shown_again(server: LiveServer) -> None:
    first = chat(server, "hi", **THINKING)["message"]
    messages = [{"role": "user", "content": "hi"}, first, {"role": "user", "content": "What is 12 + 30?"}]
    assert chat(server, messages, **THINKING)["message"]["content"] == "12 + 30 = 42"
    told = server.post("/tokenize", {"messages": messages}).json()
    without = [messages[0], {"role": "assistant", "content": first["content"]}, messages[2]]
    assert told == server.post("/tokenize", {"messages": without}).json()


# ---- tools ---------------------------------------------------------------------------------------------------------


def test_it_calls_the_tool_that_fits(server: LiveServer) -> None:
    for question, call in {
        "What is the weather in Paris?": ("get_weather", {"city": "Paris"}),
        "How is the weather in Lisbon?": ("get_weather", {"city": "Lisbon"}),
        "Add 17 and 25.": ("add", {"a": 17, "b": 25}),
        "What is 31 + 64?": ("add", {"a": 31, "b": 64}),
    }.items():
        choice = chat(server, question, **TOOLS)
        assert (choice["finish_reason"], calls(choice["message"])) == ("tool_calls", [call]), choice
        assert calls(streamed(server, question, **TOOLS)) == [call]
        assert calls(chat(server, question, **TOOLS, **THINKING)["message"]) == [call]


def test_it_calls_several_tools_at_once(server: LiveServer) -> None:
    cities = chat(server, "What is the weather in Rome and Oslo?", **TOOLS)
    assert calls(cities["message"]) == [("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Oslo"})]
    one = chat(server, "What is the weather in Rome and Oslo?", **TOOLS, parallel_tool_calls=False)
    assert calls(one["message"]) == [("get_weather", {"city": "Rome"})]


def test_it_calls_none_that_does_not_fit(server: LiveServer) -> None:
    for question in ("hi", "What is a radix cache?", "What is the capital of France?", "thanks"):
        choice = chat(server, question, **TOOLS)
        assert not choice["message"]["tool_calls"], choice
        assert choice["message"]["content"] == chat(server, question)["message"]["content"]


def test_tool_choice_is_followed(server: LiveServer) -> None:
    required = chat(server, "What is the weather in Vienna?", **TOOLS, tool_choice="required")
    assert calls(required["message"]) == [("get_weather", {"city": "Vienna"})]
    named = {"type": "function", "function": {"name": "add"}}
    assert calls(chat(server, "Add 3 and 4.", **TOOLS, tool_choice=named)["message"]) == [("add", {"a": 3, "b": 4})]
    assert not chat(server, "Add 3 and 4.", **TOOLS, tool_choice="none")["message"]["tool_calls"]


def test_it_answers_from_what_the_tool_says(server: LiveServer) -> None:
    asked = {"role": "user", "content": "What is the weather in Paris?"}
    called = chat(server, [asked], **TOOLS)["message"]
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"]}
    result["content"] = json.dumps({"temperature": 18, "condition": "sunny"})
    answered = chat(server, [asked, called, result], **TOOLS)
    assert answered["message"]["content"] == "The weather in Paris is sunny with 18 °C."


# ---- JSON under a schema -------------------------------------------------------------------------------------------


def as_response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def records(count: int) -> list[tuple[list[dict[str, Any]], schemas.Record]]:
    """Held-out texts with the schema that the prompt shows."""
    rng, found = random.Random("schemas"), []
    while len(found) < count:
        record = schemas.record(rng)
        if demo_corpus.is_held_out(record.text):
            found.append((schemas.asked(rng, record), record))
    return found


def strict(schema: Any) -> Any:
    """As programs write them that send one with a request: every field is required, and there are no others."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: strict(part) for name, part in schema.items()}
    if schema.get("type") == "object":
        parts |= {"required": list(schema["properties"]), "additionalProperties": False}
    return parts


def test_json_in_the_shape_that_the_prompt_shows(server: LiveServer) -> None:
    asked = records(NUM_ASKED)
    free = each(lambda a: chat(server, a[0])["message"]["content"], asked)
    held = each(lambda a: chat(server, a[0], **as_response_format(a[1].schema)), asked)
    num_free = sum(text == json.dumps(record.value, ensure_ascii=False) for text, (_, record) in zip(free, asked, strict=True))
    num_held = sum(valid(choice, record.schema) == record.value for choice, (_, record) in zip(held, asked, strict=True))
    print(f"of {NUM_ASKED}: {num_free} right as the model likes, {num_held} under the grammar")
    assert num_free >= 24 and num_held >= 24


def valid(choice: dict[str, Any], schema: dict[str, Any]) -> Any:
    """The answer, which must be one that follows the schema."""
    assert choice["finish_reason"] == "stop", choice
    value = json.loads(choice["message"]["content"])
    jsonschema.validate(value, schema)
    return value


def test_texts_in_shapes_that_only_the_server_knows(server: LiveServer) -> None:
    """As most programs ask: the text alone, the schema as the format of the answer."""
    asked = [record for _, record in records(NUM_ASKED)]
    told = each(lambda record: chat(server, record.text, **as_response_format(strict(record.schema))), asked)
    num_right = sum(valid(choice, strict(r.schema)) == r.value for choice, r in zip(told, asked, strict=True))
    print(f"of {NUM_ASKED}: {num_right} right")
    assert num_right >= 26


def test_json_in_a_shape_that_only_the_server_knows(server: LiveServer) -> None:
    person = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
        "required": ["name", "age", "city"],
    }
    answer = chat(
        server, "Extract name, age and city as JSON: Maria is 34 years old and lives in Paris.", **as_response_format(person)
    )
    assert json.loads(answer["message"]["content"]) == {"name": "Maria", "age": 34, "city": "Paris"}
