"""A message that is a JSON array of calls and nothing else, for models that have no format of their own, under a grammar.

[{"name": "f", "parameters": {"x": 1}}]
"""

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
    covers_thinking = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _Parser(tools)

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        calls = [
            grammar.tag(f'{{"name": {json.dumps(grammar.name_of(tool))}, "parameters": ', grammar.arguments(tool), "}")
            for tool in tools
        ]
        array = grammar.tag("[", grammar.tags_with_separator(calls, ", ", stop_after_first=stop_after_first), "]")
        return grammar.structural_tag(array if at_least_one else grammar.either(array, grammar.any_text()))


class _Parser(JsonCallParser):
    begins = ends = Tags()
    is_text_if_cut_off = True

    def call(self, tag: str) -> Read[None]:
        if (yield from self.reader.peek()) == "[":
            yield from self.call_objects()
        else:
            yield from self.call_object()

    def _message(self) -> Read[None]:
        yield from self._attempt((yield from self.reader.space()))
        yield from self.reader.to_the_end(self.out.content)
