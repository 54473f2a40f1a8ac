"""What models are taught to write is what the structural tags of their formats let them write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammar_sampler import accept_all
from parser_messages import TOOLS
from spellings import SPELLINGS, Call
from tokenizers import Tokenizer

from jaxserve.grammar import GrammarCompiler
from jaxserve.parsers.tools import TOOL_FORMATS
from jaxserve.types import Grammar

# Spellings that models have, but not those that their grammars choose.
OTHERS = {"llama3/python", "mistral/CALL_ID", "pythonic", "pythonic/tags"}
PARIS: Call = ("get_weather", {"city": 'Paris "x" \\ é', "days": 3, "tags": ["a", {"b": 1}], "where": {"lat": 1.5}})
ONE: list[list[Call]] = [[PARIS], [("get", {"key": "k"})], [("now", {})], [("get_weather", {"days": -1})]]
SEVERAL: list[list[Call]] = [[PARIS, ("now", {}), ("get", {"key": "k"})]]


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, tag: dict[str, Any], text: str) -> bool:
    matcher = compiler.submit(Grammar("structural_tag", json.dumps(tag))).result().matcher()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return accept_all(matcher, ids) == len(ids) and matcher.may_end


@pytest.mark.parametrize("name", sorted(SPELLINGS.keys() - OTHERS))
def test_calls_as_models_write_them(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    tools = TOOL_FORMATS[name.partition("/")[0]]
    for required in (True, False):
        any_number = tools.structural_tag(TOOLS, at_least_one=required, stop_after_first=False)
        for calls in ONE + (SEVERAL if name != "gpt-oss" else []):
            text = SPELLINGS[name](calls).removeprefix("<|start|>assistant").removesuffix("<|call|>")
            assert accepts(compiler, tokenizer, any_number, text), text
        assert accepts(compiler, tokenizer, any_number, "I do not know.") != required


@pytest.mark.parametrize("name", sorted(SPELLINGS.keys() - OTHERS - {"gpt-oss"}))
def test_only_one_if_so_asked(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    tools = TOOL_FORMATS[name.partition("/")[0]]
    just_one = tools.structural_tag(TOOLS, at_least_one=True, stop_after_first=True)
    assert accepts(compiler, tokenizer, just_one, SPELLINGS[name](ONE[0]))
    assert not accepts(compiler, tokenizer, just_one, SPELLINGS[name](SEVERAL[0]))
