"""MessageFormat: the reasoning format and the tool format of a model, by the options' names, and the parser of one message."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxserve.parsers.base import Parser, ReasoningFormat, Tool, ToolFormat
from jaxserve.parsers.pieces import Content, Piece
from jaxserve.parsers.reasoning import REASONING_FORMATS
from jaxserve.parsers.tools import TOOL_FORMATS


@dataclasses.dataclass(frozen=True)
class MessageFormat:
    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the parser must see special tokens."""
        return any(part is not None and part.keeps_special_tokens for part in (self.reasoning, self.tools))

    def parser(self, tools: Sequence[Tool] = (), *, is_open: bool = False, separate_reasoning: bool = True) -> MessageParser:
        """For one message. `tools` are those that may be called; `is_open` as the reasoning format said of the prompt."""
        reasoning = self.reasoning.parser(is_open=is_open) if self.reasoning is not None and separate_reasoning else None
        return MessageParser(reasoning, self.tools.parser(tools) if self.tools is not None and tools else None)


def message_format(reasoning_parser: str | None, tool_call_parser: str | None) -> MessageFormat:
    """Of --reasoning-parser and --tool-call-parser, which must be names of REASONING_FORMATS and TOOL_FORMATS."""
    return MessageFormat(
        REASONING_FORMATS[reasoning_parser] if reasoning_parser is not None else None,
        TOOL_FORMATS[tool_call_parser] if tool_call_parser is not None else None,
    )


class MessageParser:
    """A Parser: reasoning first, and what is content then goes through the tool parser."""

    def __init__(self, reasoning: Parser | None, tools: Parser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = [Content(text)] if text else []
        if self._reasoning is not None:
            pieces = self._reasoning.feed(text)
        return self._with_calls(pieces)

    def finish(self) -> list[Piece]:
        pieces = [] if self._reasoning is None else self._with_calls(self._reasoning.finish())
        return pieces if self._tools is None else [*pieces, *self._tools.finish()]

    def _with_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._tools is None:
            return pieces
        parsed: list[Piece] = []
        for piece in pieces:
            parsed.extend(self._tools.feed(piece.text) if isinstance(piece, Content) else [piece])
        return parsed
