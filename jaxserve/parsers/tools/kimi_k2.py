"""Kimi K2: the call's id has the tool's name and a count.

<|tool_calls_section_begin|>
<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>
<|tool_calls_section_end|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jaxserve.parsers import grammar
from jaxserve.parsers.base import Parser, Tool
from jaxserve.parsers.calls import CallParser
from jaxserve.parsers.reader import Read, Tags

BEGIN = "<|tool_calls_section_begin|>"
_END = "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_DIGITS, _LONGEST_COUNT = re.compile("[0-9]*"), 32


class KimiK2Format:
    keeps_special_tokens = True
    covers_thinking = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _Parser(tools)

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        calls = [
            grammar.tag(
                f"{_CALL}functions.{grammar.name_of(tool)}:",
                grammar.sequence(grammar.regex("[0-9]{1,4}"), grammar.const(_ARGUMENTS), grammar.arguments(tool)),
                _CALL_END,
            )
            for tool in tools
        ]
        return grammar.section_of_calls(BEGIN, calls, "", _END, at_least_one=at_least_one, stop_after_first=stop_after_first)


class _Parser(CallParser):
    begins, ends = Tags(BEGIN, _END, _CALL), Tags(_CALL_END)

    def call(self, tag: str) -> Read[None]:
        if tag != _CALL:
            self.skip()
            return
        yield from self.reader.space()
        namespace = yield from self.reader.accept("functions.")
        name = yield from self.name()
        count = yield from self.reader.accept(":")
        if count:
            count += self.reader.take(len((yield from self.reader.word(_DIGITS, _LONGEST_COUNT))))
        yield from self.reader.space()
        yield from self.reader.expect(_ARGUMENTS)
        yield from self.reader.space()
        yield from self.named_call(name, f"{namespace}{name}{count}" if count else None)
        yield from self.reader.space()
        yield from self.reader.accept(_CALL_END)
