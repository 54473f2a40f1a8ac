"""What parsers of calls share: text goes through until a call begins, and a call that breaks is text after all.

A format says at which tags calls begin and reads one. Until `begin` it may find that there is none: all that was read is
content then, unless the message just ends there. What breaks later stays what it is, unfinished, and the text behind it is
content, up to the call's end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxserve.parsers.base import Tool
from jaxserve.parsers.generator import GeneratorParser
from jaxserve.parsers.reader import BrokenCallError, CutOffError, Read, Sink, Tags
from jaxserve.parsers.values import as_json, string, value


class CallParser(GeneratorParser):
    begins: Tags  # where a call may begin
    ends: Tags  # where one that broke is over
    is_text_if_cut_off = False  # what may have become a call when the message ends; else it is neither call nor content

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        functions = [tool["function"] for tool in tools]
        self.schemas: dict[str, Any] = {function["name"]: function.get("parameters") or {} for function in functions}
        self._is_in_call = False

    def call(self, tag: str) -> Read[None]:
        """Reads what the tag begins: a call, perhaps several."""
        raise NotImplementedError

    def name(self) -> Read[str]:
        """A tool's name comes next."""
        return (yield from self.reader.longest_of(self.schemas))

    def begin(self, name: str | None, call_id: str | None = None) -> None:
        """What was read so far begins a call, if it calls a tool."""
        if name not in self.schemas:
            raise BrokenCallError
        self.reader.forget()
        self._is_in_call = True
        self.out.begin_call(name, call_id)

    def end(self) -> None:
        """The call is whole. What follows may be another, or text."""
        self._is_in_call = False
        self.reader.record("")

    def skip(self) -> None:
        """What was read so far only stands around calls."""
        self.reader.record("")
        self.out.tag()

    def named_call(self, name: str, call_id: str | None = None) -> Read[None]:
        """The arguments come next, and then the call is whole."""
        yield from self.begin_with_arguments(name, call_id)
        self.end()

    def begin_with_arguments(self, name: str, call_id: str | None = None) -> Read[None]:
        if (yield from self.reader.peek()) == "{":
            self.begin(name, call_id)
            yield from value(self.reader, self.out.arguments)
        else:
            held: list[str] = []
            yield from self.arguments(held.append)
            self.begin(name, call_id)
            self.out.arguments("".join(held))

    def arguments(self, sink: Sink) -> Read[None]:
        """An object; or one within a string, or null, which some models write."""
        char = yield from self.reader.peek()
        if char == "{":
            yield from value(self.reader, sink)
        elif char == '"':
            parts: list[str] = []
            yield from string(self.reader, parts.append)
            arguments = as_json(json.loads("".join(parts)))
            if arguments is None or not arguments.startswith("{"):
                raise BrokenCallError
            sink(arguments)
        else:
            yield from self.reader.expect("null")
            sink("{}")

    def _message(self) -> Read[None]:
        tags = self.begins
        while (tag := (yield from self.reader.until(tags, self.out.content))) is not None:
            tags = self.begins
            if tag in self.begins.tags:
                self._is_in_call = False
                yield from self._attempt(tag)
                if self._is_in_call:
                    tags = self.begins + self.ends
            else:
                self.out.tag()

    def _attempt(self, tag: str) -> Read[None]:
        """Reads what may be calls; a broken one is still `_is_in_call` behind it."""
        self.reader.record(tag)
        try:
            yield from self.call(tag)
        except CutOffError:
            rest = self.reader.forget() + self.reader.rest()
            if self.is_text_if_cut_off and not self._is_in_call:
                self.out.content(rest)
        except BrokenCallError:
            if not self._is_in_call:
                self.out.content(self.reader.forget())
        self.reader.forget()
