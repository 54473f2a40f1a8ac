"""DeepSeek V3.1: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.parsers import grammar
from jaxserve.parsers.base import Parser, Tool
from jaxserve.parsers.calls import CallParser
from jaxserve.parsers.reader import Read, Tags
from jaxserve.parsers.tools.deepseekv3 import BEGIN, CALL, CALL_END, END, SEPARATOR


class DeepSeekV31Format:
    keeps_special_tokens = True
    covers_thinking = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _Parser(tools)

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        calls = [grammar.tag(CALL + grammar.name_of(tool) + SEPARATOR, grammar.arguments(tool), CALL_END) for tool in tools]
        return grammar.section_of_calls(BEGIN, calls, "", END, at_least_one=at_least_one, stop_after_first=stop_after_first)


class _Parser(CallParser):
    begins, ends = Tags(BEGIN, END, CALL), Tags(CALL_END)

    def call(self, tag: str) -> Read[None]:
        if tag != CALL:
            self.skip()
            return
        name = yield from self.name()
        yield from self.reader.expect(SEPARATOR)
        yield from self.reader.space()
        yield from self.named_call(name)
        yield from self.reader.space()
        yield from self.reader.accept(CALL_END)
