"""Calls as a JSON array: [{"name": "f", "parameters": {...}}, ...]. For models whose own way to call is not known: a grammar
makes them write this, where a call is forced."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxserve.parsers import grammar
from jaxserve.parsers.base import Parser, Tool
from jaxserve.parsers.json_calls import JsonCallParser
from jaxserve.parsers.reader import Read, Tags


class JsonArrayFormat:
    keeps_special_tokens = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _Parser(tools)

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        assert at_least_one, "an array is no text in which calls could stand"
        calls = [
            grammar.tag(f'{{"name": {json.dumps(grammar.name_of(tool))}, "parameters": ', grammar.arguments(tool), "}")
            for tool in tools
        ]
        array = grammar.tags_with_separator(calls, ", ", stop_after_first=stop_after_first)
        return grammar.structural_tag(grammar.sequence(grammar.const("["), array, grammar.const("]")))


class _Parser(JsonCallParser):
    begins, ends = Tags("["), Tags("]")

    def call(self, tag: str) -> Read[None]:
        while True:
            yield from self.reader.space()
            yield from self.call_object()
            yield from self.reader.space()
            if not (yield from self.reader.accept(",")):
                break
        yield from self.reader.expect("]")
