"""Llama 4 and others: [f(x=1), g(y="z")], with Python's literals."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jaxserve.parsers import grammar
from jaxserve.parsers.base import Parser, Tool
from jaxserve.parsers.calls import CallParser
from jaxserve.parsers.reader import Read, Tags
from jaxserve.parsers.schema import properties
from jaxserve.parsers.values import value

_START, _END = "<|python_start|>", "<|python_end|>"
_LONGEST_KEY = 512
_KEY = re.compile(r"\w*")


class PythonicFormat:
    keeps_special_tokens = False
    covers_thinking = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return PythonicParser(tools)

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        calls = grammar.tags_with_separator([call_grammar(tool) for tool in tools], ", ", stop_after_first=stop_after_first)
        array = grammar.tag("[", calls, "]")
        return grammar.structural_tag(array if at_least_one else grammar.either(array, grammar.any_text()))


def call_grammar(tool: Tool) -> grammar.Node:
    """f(x=1): required arguments, then the others. JSON's values are read as well as Python's."""
    schema = grammar.schema_of(tool)
    required = grammar.required(tool)
    values = {key: grammar.schema(grammar.standalone(value, schema)) for key, value in properties(schema).items()}
    needed = [key for key in values if key in required]
    others = [key for key in values if key not in required]
    if needed:
        elements = [grammar.tag(f"{', ' if at else ''}{key}=", values[key], "") for at, key in enumerate(needed)]
        elements += [grammar.either(grammar.tag(f", {key}=", values[key], ""), grammar.const("")) for key in others]
        content = grammar.sequence(*elements)
    elif others:
        tags = [grammar.tag(f"{key}=", values[key], "") for key in others]
        content = grammar.either(grammar.tags_with_separator(tags, ", ", stop_after_first=False), grammar.const(""))
    else:
        content = grammar.const("")
    return grammar.tag(f"{grammar.name_of(tool)}(", content, ")")


class PythonicParser(CallParser):
    begins, ends = Tags("[", _START, _END), Tags("]")
    is_text_if_cut_off = True  # brackets stand in any text

    def call(self, tag: str) -> Read[None]:
        if tag != "[":
            self.skip()
            return
        yield from self.calls()

    def calls(self) -> Read[None]:
        """Behind the bracket that opens the list."""
        while True:
            yield from self.reader.space()
            name = yield from self.name()
            yield from self.reader.expect("(")
            yield from self._arguments(name)
            yield from self.reader.space()
            if (yield from self.reader.expect(",", "]")) == "]":
                return

    def _arguments(self, name: str) -> Read[None]:
        opening = "{"
        while True:
            yield from self.reader.space()
            if (yield from self.reader.accept(")")):
                break
            key = self.reader.take(len((yield from self.reader.word(_KEY, _LONGEST_KEY))))
            yield from self.reader.space()
            yield from self.reader.expect("=")
            yield from self.reader.space()
            if opening == "{":
                self.begin(name)
            self.out.arguments(f"{opening}{json.dumps(key)}: ")
            opening = ", "
            yield from value(self.reader, self.out.arguments)
            yield from self.reader.space()
            if (yield from self.reader.expect(",", ")")) == ")":
                break
        if opening == "{":
            self.begin(name)
            self.out.arguments(opening)
        self.out.arguments("}")
        self.end()
