"""DeepSeek V3.2 and V4.

<｜DSML｜function_calls>
<｜DSML｜invoke name="f">
<｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxserve.parsers import grammar
from jaxserve.parsers.base import Parser, Tool
from jaxserve.parsers.parameter_calls import InvokeParser, Spelling, arguments_grammar
from jaxserve.parsers.reader import Tags
from jaxserve.parsers.schema import TEXT

_INVOKE, _INVOKE_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
_SPELLING = Spelling(
    '<｜DSML｜parameter name="',
    '" string="true">',
    "</｜DSML｜parameter>",
    _INVOKE_END,
    key_end_pattern=r'"\s+string="[^"]*"\s*>',
    json_key_end='" string="false">',
)


@dataclasses.dataclass(frozen=True)
class DeepSeekV32Format:
    section: str = "function_calls"
    keeps_special_tokens: bool = True
    covers_thinking: bool = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _Parser(tools, self.section)

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        begin, end = f"<｜DSML｜{self.section}>", f"</｜DSML｜{self.section}>"
        calls = [grammar.tag(f'{_INVOKE}{grammar.name_of(tool)}">', arguments_grammar(tool, _SPELLING), "\n") for tool in tools]
        content = grammar.tags_with_separator(calls, "", stop_after_first=stop_after_first)
        section = grammar.tag(f"{begin}\n", content, end)
        return grammar.triggered_tags(begin, [section], at_least_one=at_least_one, stop_after_first=stop_after_first)


class _Parser(InvokeParser):
    spelling = _SPELLING
    invoke = _INVOKE

    def __init__(self, tools: Sequence[Tool], section: str) -> None:
        self.section_end = f"</｜DSML｜{section}>"
        self.begins, self.ends = Tags(f"<｜DSML｜{section}>"), Tags(_INVOKE_END, self.section_end)
        super().__init__(tools)

    def kinds_of(self, name: str, key: str, key_end: str) -> frozenset[str]:
        return TEXT if '"true"' in key_end else super().kinds_of(name, key, key_end)
