"""MiniMax M2.

<minimax:tool_call>
<invoke name="f">
<parameter name="x">1</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.parsers import grammar
from jaxserve.parsers.base import Parser, Tool
from jaxserve.parsers.parameter_calls import InvokeParser, Spelling, arguments_grammar
from jaxserve.parsers.reader import Tags

_BEGIN, _INVOKE, _END = "<minimax:tool_call>", '<invoke name="', "</minimax:tool_call>"
_SPELLING = Spelling('<parameter name="', '">', "</parameter>", "</invoke>")


class MinimaxM2Format:
    keeps_special_tokens = True
    covers_thinking = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _Parser(tools)

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        calls = [grammar.tag(f'{_INVOKE}{grammar.name_of(tool)}">', arguments_grammar(tool, _SPELLING), "\n") for tool in tools]
        content = grammar.tags_with_separator(calls, "", stop_after_first=stop_after_first)
        section = grammar.tag(f"{_BEGIN}\n", content, _END)
        return grammar.triggered_tags(_BEGIN, [section], at_least_one=at_least_one, stop_after_first=stop_after_first)


class _Parser(InvokeParser):
    spelling = _SPELLING
    begins, ends = Tags(_BEGIN), Tags("</invoke>", _END)
    invoke, section_end = _INVOKE, _END
