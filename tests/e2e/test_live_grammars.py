"""Grammars on the demo model, through an Engine: schemas of applications, calls, thinking; with and without drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from realistic_schemas import SCHEMAS

from jaxserve import Engine
from jaxserve.demo import demo_model_path
from jaxserve.server.requests import RequestError
from jaxserve.server.tokenizer_manager import TokenizerManager

WEATHER = SCHEMAS["weather function"]
CALL = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": '<tool_call>\n{"name": "get_weather", "arguments": ',
        "content": {"type": "json_schema", "json_schema": WEATHER},
        "end": "}\n</tool_call>",
    },
}


@pytest.fixture(scope="module", params=[None, "NGRAM"], ids=["one by one", "drafts"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(
        demo_model_path(),
        max_running_requests=8,
        context_length=512,
        log_level="warning",
        reasoning_parser="qwen3",
        constrained_json_disable_any_whitespace=True,
        speculative_algorithm=request.param,
    ) as made:
        yield made


def generate(engine: Engine, grammar: dict[str, Any], count: int = 1, **more: Any) -> list[dict[str, Any]]:
    params = [
        {"temperature": 0.9, "sampling_seed": i, "max_new_tokens": 200, "skip_special_tokens": False, **grammar}
        for i in range(count)
    ]
    return list(engine.generate([f"Hello {i}" for i in range(count)], params, **more))  # type: ignore[arg-type]


def complete(replies: list[dict[str, Any]]) -> list[str]:
    return [reply["text"] for reply in replies if reply["meta_info"]["finish_reason"]["type"] == "stop"]


def test_schemas(engine: Engine) -> None:
    num_complete = 0
    for name in ("weather function", "pydantic discriminated union", "order", "expression tree", "names in unicode", "deep"):
        for text in complete(generate(engine, {"json_schema": SCHEMAS[name]}, 3)):
            jsonschema.validate(json.loads(text), SCHEMAS[name])
            num_complete += 1
    assert num_complete >= 12
    assert engine.get_server_info()["internal_states"][0]["num_jumps"] > 0


def test_calls_are_written_with_special_tokens(engine: Engine) -> None:
    replies = generate(engine, {"structural_tag": CALL}, 4)
    assert len(complete(replies)) == 4
    for reply in replies:
        assert reply["output_ids"][0] == 2044
        assert reply["text"].startswith("<tool_call>\n{") and reply["text"].removesuffix("<|im_end|>").endswith(
            "}\n</tool_call>"
        )
        call = json.loads(reply["text"].removesuffix("<|im_end|>").removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert call["name"] == "get_weather"
        jsonschema.validate(call["arguments"], WEATHER)


def test_thinking_comes_first(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thought was begun, and none of the model's own would end; any blank ends it here."""
    monkeypatch.setattr(TokenizerManager, "thinking_end", " ")
    grammar = {"regex": "[A-Za-z]{0,20}[0-9]{2}", "ignore_eos": True}
    replies = generate(engine, grammar, 4, require_reasoning=True)
    alone = [generate(engine, grammar, i + 1, require_reasoning=True)[i] for i in range(4)]
    assert [reply["text"] for reply in replies] == [reply["text"] for reply in alone]
    texts = complete(replies)
    assert len(texts) == 4
    for text in texts:
        _, _, answer = text.partition(" ")
        assert answer[-2:].isdigit() and " " not in answer, text


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ({"regex": "a", "structural_tag": CALL}, "regex and structural_tag cannot be combined"),
        ({"structural_tag": {"type": "structural_tag"}}, "structural_tag: format is missing."),
        ({"json_schema": {"not": {}}}, "Unimplemented keys"),
    ],
)
def test_what_cannot_be_served_is_said(engine: Engine, grammar: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        generate(engine, grammar)
    assert caught.value.status_code == 400
