"""gpt-oss: a call is a message of `harmony` to functions.NAME. Other messages are left to the reasoning format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.parsers import grammar
from jaxserve.parsers.base import Parser, Tool
from jaxserve.parsers.calls import CallParser
from jaxserve.parsers.harmony import CALL, CHANNEL, ENDS, HEADER_END, HEADERS, LONGEST_HEADER, MESSAGE, START, recipient
from jaxserve.parsers.reader import BrokenCallError, Read

_NAMESPACE = "functions."


class GptOssFormat:
    keeps_special_tokens = True
    covers_thinking = True

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _Parser(tools)

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        """A call ends the message, so there is one. It comes behind thinking, of which the grammar knows therefore."""
        calls = [
            grammar.tag(
                f"{CHANNEL}commentary to={_NAMESPACE}{grammar.name_of(tool)} <|constrain|>json{MESSAGE}",
                grammar.arguments(tool),
                "",
            )
            for tool in tools
        ]
        if not at_least_one:
            trigger = f"{CHANNEL}commentary to="
            return grammar.triggered_tags(trigger, calls, at_least_one=False, stop_after_first=True)
        thinking = grammar.tag(f"{CHANNEL}analysis{MESSAGE}", grammar.any_text(), f"<|end|>{START}assistant")
        return grammar.structural_tag(grammar.sequence(grammar.either(thinking, grammar.const("")), grammar.either(*calls)))


class _Parser(CallParser):
    begins, ends = HEADERS, ENDS

    def call(self, tag: str) -> Read[None]:
        header, _ = yield from self.reader.before(HEADER_END, LONGEST_HEADER)
        name = recipient(tag + header)
        if name is None:
            raise BrokenCallError
        yield from self.reader.space()
        yield from self.named_call(name.removeprefix(_NAMESPACE))
        yield from self.reader.space()
        yield from self.reader.accept(CALL)
