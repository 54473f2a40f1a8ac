"""A call as a JSON object: {"name": "f", "arguments": {...}}, as most models write it, with tags of their own around it."""

from __future__ import annotations

import json
import re

from jaxserve.parsers.calls import CallParser
from jaxserve.parsers.reader import BrokenCallError, Read
from jaxserve.parsers.values import value

_LONGEST_WORD = 512
_QUOTE = {quote: re.compile(quote) for quote in ('"', "'")}
_ARGUMENTS = ("arguments", "parameters")


class JsonCallParser(CallParser):
    def call_object(self) -> Read[None]:
        """Its members come in any order; those that are not of a call say that it is none."""
        name = call_id = None
        held: list[str] = []  # arguments that come before the name
        has_begun = False
        yield from self.reader.expect("{")
        while True:
            yield from self.reader.space()
            key = yield from self._word()
            yield from self.reader.space()
            yield from self.reader.expect(":")
            yield from self.reader.space()
            if key == "name" and name is None:
                name = yield from self._word()
                if name not in self.schemas:
                    raise BrokenCallError
            elif key == "id" and call_id is None:
                call_id = yield from self._word()
            elif key in _ARGUMENTS and name is not None and not has_begun:
                has_begun = True
                yield from self.begin_with_arguments(name, call_id)
            elif key in _ARGUMENTS and not held:
                yield from self.arguments(held.append)
            elif key == "type":
                yield from value(self.reader, lambda text: None)
            else:
                raise BrokenCallError
            yield from self.reader.space()
            if not (yield from self.reader.accept(",")):
                break
            yield from self.reader.space()
            if (yield from self.reader.peek()) == "}":
                break
        yield from self.reader.expect("}")
        if not has_begun:
            self.begin(name, call_id)
            self.out.arguments("".join(held) or "{}")
        self.end()

    def call_objects(self) -> Read[None]:
        """An array of them."""
        yield from self.reader.expect("[")
        yield from self.reader.space()
        while True:
            yield from self.call_object()
            yield from self.reader.space()
            if not (yield from self.reader.accept(",")):
                break
            yield from self.reader.space()
        yield from self.reader.expect("]")

    def _word(self) -> Read[str]:
        quote = yield from self.reader.expect('"', "'")
        word, _ = yield from self.reader.before(_QUOTE[quote], _LONGEST_WORD)
        try:
            return str(json.loads(f'"{word}"')) if "\\" in word else word
        except ValueError:
            raise BrokenCallError from None
