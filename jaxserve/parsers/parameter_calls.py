"""A call as tags with its arguments as bare text between them: <parameter=city>Paris</parameter>, in several spellings."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence

from jaxserve.parsers import grammar
from jaxserve.parsers.base import Tool
from jaxserve.parsers.calls import CallParser
from jaxserve.parsers.reader import Read, Tags
from jaxserve.parsers.schema import TEXT, choices, kinds, properties, typed
from jaxserve.parsers.values import escaped

_LONGEST_KEY = 512


@dataclasses.dataclass(frozen=True)
class Spelling:
    """How a call is written: behind its name come parameters, each `parameter` key `key_end` value `value_end`, and `end`."""

    parameter: str
    key_end: str
    value_end: str
    end: str
    # What stands before and behind a value without being part of it.
    padding: str = ""
    # How one finds the end of a key, where models write more than `key_end`; what is found goes to `kinds_of`.
    key_end_pattern: str | None = None
    # Models forget `value_end`: the next parameter or the call's end also ends a value.
    is_forgotten: bool = False
    # What stands before each parameter and before `end`, and the `key_end` of values that are JSON, as models are taught it.
    between: str = "\n"
    json_key_end: str | None = None


class ParameterCallParser(CallParser):
    spelling: Spelling

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        spelling = self.spelling
        self._key_end = re.compile(spelling.key_end_pattern or re.escape(spelling.key_end))
        ends = [spelling.value_end, *([spelling.parameter, spelling.end] if spelling.is_forgotten else [])]
        self._value_ends = Tags(*ends, *(spelling.padding + end for end in ends if spelling.padding))

    def kinds_of(self, name: str, key: str, key_end: str) -> frozenset[str]:
        """Types that an argument may have."""
        return kinds(self.schemas[name], key)

    def parameters(self, name: str) -> Read[None]:
        """All behind the name."""
        spelling, out = self.spelling, self.out
        yield from self.reader.space()
        tag = yield from self.reader.expect(spelling.parameter, spelling.end)
        self.begin(name)
        out.arguments("{")
        separator = ""
        while tag == spelling.parameter:
            key, key_end = yield from self.reader.before(self._key_end, _LONGEST_KEY)
            out.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            tag = yield from self._value(self.kinds_of(name, key, key_end))
            if tag == spelling.value_end:
                yield from self.reader.space()
                tag = yield from self.reader.expect(spelling.parameter, spelling.end)
            separator = ", "
        out.arguments("}")
        self.end()

    def _value(self, kinds: frozenset[str]) -> Read[str]:
        """Returns the tag that ends it."""
        padding, out, parts = self.spelling.padding, self.out, list[str]()
        if padding:
            yield from self.reader.accept(padding)
        if kinds == TEXT:
            out.arguments('"')
            tag = yield from self.reader.until_tag(self._value_ends, lambda text: out.arguments(escaped(text)))
            out.arguments('"')
        else:
            tag = yield from self.reader.until_tag(self._value_ends, parts.append)
            out.arguments(typed("".join(parts), kinds))
        return tag.removeprefix(padding)


class InvokeParser(ParameterCallParser):
    """A section of calls that begin with <invoke name="f"> or so."""

    invoke: str
    section_end: str

    def call(self, tag: str) -> Read[None]:
        while True:
            yield from self.reader.space()
            if (yield from self.reader.expect(self.invoke, self.section_end)) == self.section_end:
                self.skip()
                return
            yield from self.invocation()

    def invocation(self) -> Read[None]:
        """Behind <invoke name=" and so on; the arguments may be JSON, or none at all."""
        name = yield from self.name()
        yield from self.reader.expect('"')
        yield from self.reader.space()
        is_empty = (yield from self.reader.expect(">", "/>")) == "/>"
        if is_empty:
            self.begin(name)
            self.out.arguments("{}")
            self.end()
            return
        yield from self.reader.space()
        if (yield from self.reader.peek()) == "{":
            yield from self.named_call(name)
            yield from self.reader.space()
            yield from self.reader.accept(self.spelling.end)
        else:
            yield from self.parameters(name)


def arguments_grammar(tool: Tool, spelling: Spelling) -> grammar.Node:
    """All behind the name, the schema's arguments in its order; those that are not required may be left out."""
    schema = grammar.schema_of(tool)
    required = grammar.required(tool)
    elements = []
    for key, of_one in properties(schema).items():
        key_end, value = spelling.key_end, grammar.any_text()
        if "string" not in kinds(schema, key):
            key_end, value = spelling.json_key_end or key_end, grammar.schema(grammar.standalone(of_one, schema))
        elif texts := choices(of_one):
            value = grammar.either(*map(grammar.const, texts))
        begin = spelling.between + spelling.parameter + key + key_end + spelling.padding
        parameter = grammar.tag(begin, value, spelling.padding + spelling.value_end)
        elements.append(parameter if key in required else grammar.either(parameter, grammar.const("")))
    return grammar.sequence(*elements, grammar.const(spelling.between + spelling.end))
