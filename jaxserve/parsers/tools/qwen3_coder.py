"""Qwen3-Coder, MiMo, Step 3.5.

<tool_call>
<function=f>
<parameter=x>
1
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.parsers import grammar
from jaxserve.parsers.base import Parser, Tool
from jaxserve.parsers.parameter_calls import ParameterCallParser, Spelling, arguments_grammar
from jaxserve.parsers.reader import Read, Tags

_BEGIN, _FUNCTION, _END = "<tool_call>", "<function=", "</tool_call>"
_SPELLING = Spelling("<parameter=", ">", "</parameter>", "</function>", padding="\n", is_forgotten=True)


class Qwen3CoderFormat:
    keeps_special_tokens = False
    covers_thinking = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _Parser(tools)

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        tags = [
            grammar.tag(f"{_BEGIN}\n{_FUNCTION}{grammar.name_of(tool)}>", arguments_grammar(tool, _SPELLING), f"\n{_END}")
            for tool in tools
        ]
        return grammar.triggered_tags(_BEGIN, tags, at_least_one=at_least_one, stop_after_first=stop_after_first)


class _Parser(ParameterCallParser):
    spelling = _SPELLING
    begins, ends = Tags(_BEGIN, _FUNCTION), Tags("</function>", _END)

    def call(self, tag: str) -> Read[None]:
        if tag == _BEGIN:
            yield from self.reader.space()
            yield from self.reader.expect(_FUNCTION)
        name = yield from self.name()
        yield from self.reader.expect(">")
        yield from self.parameters(name)
        yield from self.reader.space()
        yield from self.reader.accept(_END)
