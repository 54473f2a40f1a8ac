"""DeepSeek V3 and R1.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{"x": 1}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.parsers import grammar
from jaxserve.parsers.base import Parser, Tool
from jaxserve.parsers.calls import CallParser
from jaxserve.parsers.reader import Read, Tags

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekV3Format:
    keeps_special_tokens = True
    covers_thinking = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _Parser(tools)

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        calls = [
            grammar.tag(
                f"{CALL}function{SEPARATOR}{grammar.name_of(tool)}\n```json\n", grammar.arguments(tool), f"\n```{CALL_END}"
            )
            for tool in tools
        ]
        return grammar.section_of_calls(BEGIN, calls, "\n", END, at_least_one=at_least_one, stop_after_first=stop_after_first)


class _Parser(CallParser):
    begins, ends = Tags(BEGIN, END, CALL), Tags(CALL_END)

    def call(self, tag: str) -> Read[None]:
        if tag != CALL:
            self.skip()
            return
        yield from self.reader.expect("function" + SEPARATOR)
        name = yield from self.name()
        if (yield from self.reader.expect("\n", "```json")) == "\n":
            yield from self.reader.space()
            if (yield from self.reader.peek()) == "`":
                yield from self.reader.expect("```json")
        yield from self.reader.space()
        yield from self.named_call(name)
        for rest in ("```", CALL_END):
            yield from self.reader.space()
            yield from self.reader.accept(rest)
