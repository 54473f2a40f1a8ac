"""The structural tag of every tool format compiles, and what it lets out is read by the format's own parser as calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from grammar_sampler import accept_all, allow_all, allowed_ids
from tokenizers import Tokenizer

from jaxserve.grammar import GrammarCompiler, Matcher
from jaxserve.parsers.pieces import CallArguments, CallBegin
from jaxserve.parsers.tools import TOOL_FORMATS
from jaxserve.types import Grammar

VOCAB_SIZE, EOS = 2080, (2041, 2042)
SCHEMAS: dict[str, dict[str, Any]] = {
    "say": {
        "type": "object",
        "properties": {"words": {"type": "string"}},
        "required": ["words"],
        "additionalProperties": False,
    },
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "flag": {"type": "boolean"}, "kind": {"enum": ["x", "y"]}},
        "required": ["a", "flag"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]


def texts_behind(node: Any) -> Iterator[str]:
    """What a structural tag ends its parts with, which no random walk would spell."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name in ("end", "separator", "value") and isinstance(value, str) and value:
                yield value
            yield from texts_behind(value)
    elif isinstance(node, list):
        for value in node:
            yield from texts_behind(value)


def draw(matcher: Matcher, endings: list[list[int]], rng: np.random.Generator) -> list[int]:
    """A whole output: some random tokens, then whatever ends its parts soonest."""
    mask, out = allow_all(1, VOCAB_SIZE)[0], []
    while not matcher.is_terminated and len(out) < 3000:
        if matcher.may_end and len(out) > 10:
            break
        order = rng.permutation(len(endings)) if len(out) > 4 else []
        ending = next((ids for i in order if accept_all(matcher.copy(), ids := endings[i]) == len(ids)), None)
        if ending is None:
            matcher.fill_mask(mask)
            ending = [int(rng.choice([token for token in allowed_ids(mask) if token not in EOS]))]
        assert accept_all(matcher, ending) == len(ending)
        out += ending
    assert matcher.may_end, out
    return out


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@pytest.mark.parametrize(("at_least_one", "stop_after_first"), [(True, True), (True, False), (False, False), (False, True)])
def test_calls_come_out_as_the_parser_reads_them(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str, at_least_one: bool, stop_after_first: bool
) -> None:
    tool_format = TOOL_FORMATS[name]
    tag = tool_format.structural_tag(TOOLS, at_least_one=at_least_one, stop_after_first=stop_after_first)
    compiled = compiler.submit(Grammar("structural_tag", json.dumps(tag))).result()
    endings = [*texts_behind(tag), "</parameter>", "</arg_value>", '"', "}", "]", ")", "true", "0,"]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in dict.fromkeys(endings)]
    for seed in range(3 if at_least_one else 0):
        text = tokenizer.decode(draw(compiled.matcher(), ids, np.random.default_rng(seed)), skip_special_tokens=False)
        parser = tool_format.parser(TOOLS)
        pieces = [*parser.feed(text), *parser.finish()]
        calls = [piece.name for piece in pieces if isinstance(piece, CallBegin)]
        assert calls, (text, pieces)
        arguments = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
        if len(calls) == 1:
            jsonschema.validate(json.loads(arguments), SCHEMAS[calls[0]])
