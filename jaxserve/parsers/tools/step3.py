"""Step 3.

<｜tool_calls_begin｜>
<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">
<steptml:parameter name="x">1</steptml:parameter>
</steptml:invoke><｜tool_call_end｜>
<｜tool_calls_end｜>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.parsers import grammar
from jaxserve.parsers.base import Parser, Tool
from jaxserve.parsers.parameter_calls import InvokeParser, Spelling, arguments_grammar
from jaxserve.parsers.reader import Read, Tags

_BEGIN, _END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_CALL, _CALL_END = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
_INVOKE = 'function<｜tool_sep｜><steptml:invoke name="'
_SPELLING = Spelling('<steptml:parameter name="', '">', "</steptml:parameter>", "</steptml:invoke>")


class Step3Format:
    keeps_special_tokens = True
    covers_thinking = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _Parser(tools)

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        calls = [
            grammar.tag(f'{_CALL}{_INVOKE}{grammar.name_of(tool)}">', arguments_grammar(tool, _SPELLING), f"{_CALL_END}\n")
            for tool in tools
        ]
        content = grammar.tags_with_separator(calls, "", stop_after_first=stop_after_first)
        section = grammar.tag(f"{_BEGIN}\n", content, _END)
        return grammar.triggered_tags(_BEGIN, [section], at_least_one=at_least_one, stop_after_first=stop_after_first)


class _Parser(InvokeParser):
    spelling = _SPELLING
    begins, ends = Tags(_BEGIN, _END, _CALL), Tags(_CALL_END)

    def call(self, tag: str) -> Read[None]:
        if tag != _CALL:
            self.skip()
            return
        yield from self.reader.expect(_INVOKE)
        yield from self.invocation()
        yield from self.reader.accept(_CALL_END)
