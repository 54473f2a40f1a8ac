"""GLM 4.5 to 5; the newer ones write it without line breaks.

<tool_call>f
<arg_key>x</arg_key>
<arg_value>1</arg_value>
</tool_call>
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxserve.parsers import grammar
from jaxserve.parsers.base import Parser, Tool
from jaxserve.parsers.parameter_calls import ParameterCallParser, Spelling, arguments_grammar
from jaxserve.parsers.reader import Read, Tags

_BEGIN, _END = "<tool_call>", "</tool_call>"
_SPELLING = Spelling(
    "<arg_key>",
    "</arg_key>\n<arg_value>",
    "</arg_value>",
    _END,
    key_end_pattern=r"</arg_key>\s*<arg_value>",
)


@dataclasses.dataclass(frozen=True)
class Glm45Format:
    has_line_breaks: bool = True
    keeps_special_tokens: bool = True
    covers_thinking: bool = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _Parser(tools)

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        spelling = _SPELLING
        if not self.has_line_breaks:
            spelling = dataclasses.replace(spelling, between="", key_end=spelling.key_end.replace("\n", ""))
        tags = [grammar.tag(_BEGIN + grammar.name_of(tool), arguments_grammar(tool, spelling), "") for tool in tools]
        return grammar.triggered_tags(_BEGIN, tags, at_least_one=at_least_one, stop_after_first=stop_after_first)


class _Parser(ParameterCallParser):
    spelling = _SPELLING
    begins, ends = Tags(_BEGIN), Tags(_END)

    def call(self, tag: str) -> Read[None]:
        yield from self.reader.space()
        yield from self.parameters((yield from self.name()))
