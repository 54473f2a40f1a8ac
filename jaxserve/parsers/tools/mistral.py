"""Mistral: [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}], and since 2025 [TOOL_CALLS]f[ARGS]{"x": 1} for each call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jaxserve.parsers import grammar
from jaxserve.parsers.base import Parser, Tool
from jaxserve.parsers.json_calls import JsonCallParser
from jaxserve.parsers.reader import Read, Tags

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LONGEST_ID = 512
_ID_END = re.compile(r"\[ARGS\]")


class MistralFormat:
    keeps_special_tokens = True
    covers_thinking = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _Parser(tools)

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        named = [grammar.tag(_BEGIN + grammar.name_of(tool) + _ARGUMENTS, grammar.arguments(tool), "") for tool in tools]
        listed = [
            grammar.tag(f'{{"name": {json.dumps(grammar.name_of(tool))}, "arguments": ', grammar.arguments(tool), "}")
            for tool in tools
        ]
        array = grammar.tags_with_separator(listed, ", ", stop_after_first=stop_after_first)
        tags = [grammar.tag(f"{_BEGIN}{space}[", array, "]") for space in (" ", "")]
        return grammar.triggered_tags(_BEGIN, tags + named, at_least_one=at_least_one, stop_after_first=stop_after_first)


class _Parser(JsonCallParser):
    begins = ends = Tags(_BEGIN)

    def call(self, tag: str) -> Read[None]:
        yield from self.reader.space()
        if (yield from self.reader.peek()) == "[":
            yield from self.call_objects()
            return
        name, call_id = (yield from self.name()), None
        if (yield from self.reader.accept(_ID)):
            call_id, _ = yield from self.reader.before(_ID_END, _LONGEST_ID)
        elif (yield from self.reader.peek()) != "{":
            yield from self.reader.expect(_ARGUMENTS)
        yield from self.reader.space()
        yield from self.named_call(name, call_id)
