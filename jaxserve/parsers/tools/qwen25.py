"""Qwen 2.5 and 3, Hermes and many others.

<tool_call>
{"name": "f", "arguments": {"x": 1}}
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxserve.parsers import grammar
from jaxserve.parsers.base import Parser, Tool
from jaxserve.parsers.json_calls import JsonCallParser
from jaxserve.parsers.reader import Read, Tags

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Qwen25Format:
    keeps_special_tokens = False
    covers_thinking = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _Parser(tools)

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        tags = [
            grammar.tag(
                f'{_BEGIN}\n{{"name": {json.dumps(grammar.name_of(tool))}, "arguments": ',
                grammar.arguments(tool),
                f"}}\n{_END}",
            )
            for tool in tools
        ]
        return grammar.triggered_tags(_BEGIN, tags, at_least_one=at_least_one, stop_after_first=stop_after_first)


class _Parser(JsonCallParser):
    begins, ends = Tags(_BEGIN), Tags(_END)

    def call(self, tag: str) -> Read[None]:
        yield from self.reader.space()
        yield from self.call_object()
        yield from self.reader.space()
        yield from self.reader.accept(_END)
