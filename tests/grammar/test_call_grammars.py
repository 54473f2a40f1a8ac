"""What the grammar of calls lets through, the parser of the same format reads as those calls; for every format."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
from grammar_sampler import GrammarSampler
from tokenizers import Tokenizer

from jaxserve.config import ServerArgs
from jaxserve.grammar import GrammarCompiler
from jaxserve.parsers.message import MessageFormat, message_format
from jaxserve.parsers.tools import TOOL_FORMATS
from jaxserve.server.openai.chat.calls import grammar_of_calls
from jaxserve.server.openai.chat.message import Message
from jaxserve.server.openai.tool_choice import ToolChoice
from jaxserve.types import Grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["m", "km"]},
        "name": {"type": "string", "pattern": "^[a-z <]{0,6}$"},
        "deep": {"type": "object", "properties": {"on": {"$ref": "#/$defs/flag"}}, "required": ["on"]},
        "list": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
    },
    "required": ["count", "unit", "deep"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}  # fmt: skip
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_way", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "now", "parameters": EMPTY}},
]
FORMATS = sorted({id(one): name for name, one in TOOL_FORMATS.items()}.values())
ARGS = ServerArgs(model_path="model")


def grammar_of(name: str, *, is_forced: bool, only_one: bool, beside: Grammar | None = None) -> Grammar:
    choice = ToolChoice(TOOLS, TOOLS, is_forced)
    grammar = grammar_of_calls(choice, TOOL_FORMATS[name], beside, ARGS, only_one=only_one)
    assert grammar is not None
    return grammar


def parsed(name: str, text: str) -> Message:
    known = message_format("gpt-oss", name) if name == "gpt-oss" else MessageFormat(tools=TOOL_FORMATS[name])
    parser = known.parser(TOOLS)
    return Message.of([*parser.feed(text), *parser.finish()])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("only_one", [True, False])
def test_what_the_grammar_lets_through_is_read(
    name: str, only_one: bool, compiler: GrammarCompiler, sampler: GrammarSampler, tokenizer: Tokenizer
) -> None:
    compiled = compiler.submit(grammar_of(name, is_forced=True, only_one=only_one)).result()
    num_whole = 0
    for seed in range(6):
        drawn = sampler.draw(compiled.matcher(), np.random.default_rng(seed), max_tokens=400, hurry_after=60)
        if not drawn.is_complete:
            continue
        num_whole += 1
        text = tokenizer.decode(drawn.token_ids, skip_special_tokens=False)
        message = parsed(name, text)
        assert message.calls, text
        assert len(message.calls) == 1 or not only_one, text
        for call in message.calls:
            arguments = json.loads(call.arguments)
            jsonschema.validate(arguments, {"get_way": SCHEMA, "now": EMPTY}[call.name])
    assert num_whole >= 2


@pytest.mark.parametrize("name", FORMATS)
def test_calls_stand_beside_text_and_beside_formats(name: str, compiler: GrammarCompiler) -> None:
    for beside in (
        Grammar("json_schema", json.dumps(EMPTY)),
        Grammar("regex", "yes|no"),
        Grammar("ebnf", 'root ::= "a"'),
        None,
    ):
        assert compiler.submit(grammar_of(name, is_forced=False, only_one=True, beside=beside)).result().matcher() is not None
