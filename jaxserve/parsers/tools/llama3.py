"""Llama 3.1 to 3.3, with or without the tag, which only a message's beginning can do without.

<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxserve.parsers import grammar
from jaxserve.parsers.base import Parser, Tool
from jaxserve.parsers.json_calls import JsonCallParser
from jaxserve.parsers.reader import Read, Tags

_BEGIN = "<|python_tag|>"


class Llama3Format:
    keeps_special_tokens = True
    covers_thinking = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _Parser(tools)

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        tags = [
            grammar.tag(f'{_BEGIN}{{"name": {json.dumps(grammar.name_of(tool))}, "parameters": ', grammar.arguments(tool), "}")
            for tool in tools
        ]
        return grammar.triggered_tags(_BEGIN, tags, at_least_one=at_least_one, stop_after_first=stop_after_first)


class _Parser(JsonCallParser):
    begins = ends = Tags(_BEGIN)

    def call(self, tag: str) -> Read[None]:
        while True:
            yield from self.reader.space()
            yield from self.call_object()
            yield from self.reader.space()
            if not (yield from self.reader.accept(";")):
                return

    def _message(self) -> Read[None]:
        space = yield from self.reader.space()
        if (yield from self.reader.ahead(1)) == "{":
            self.is_text_if_cut_off = True
            yield from self._attempt(space)
            self.is_text_if_cut_off = False
        else:
            self.out.content(space)
        yield from super()._message()
