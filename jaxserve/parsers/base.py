"""What a format must say of itself. Formats are static; `parser` makes what reads one message, from its first character on.

However a stream is cut, the pieces add up to the same message, and no part of a tag is ever among them. Text that may still
become a tag waits until that is decided; `finish` is called once, at the end of the message, whole or cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jaxserve.parsers.pieces import Piece

# As chat completions have it: {"type": "function", "function": {"name": ..., "description": ..., "parameters": schema}}.
Tool = dict[str, Any]


class Parser(Protocol):
    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


class ReasoningFormat(Protocol):
    """Where the thinking of a message begins and ends."""

    @property
    def end(self) -> str:
        """The tag behind which the answer begins: until then no grammar applies."""

    @property
    def begin(self) -> str | None:
        """The tag before thinking, where the model writes it itself."""

    @property
    def other_ends(self) -> tuple[str, ...]:
        """Tags of something else, which end the thinking, too."""

    @property
    def closing(self) -> str:
        """What is written for a model that has to stop thinking; it ends with the end tag. A line's end before it is left out
        where the thinking has one."""

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether tags are special tokens, which must then be part of the text."""

    def is_open(self, prompt_tail: str) -> bool:
        """Whether the message begins inside thinking, from the end of the prompt's text."""

    def parser(self, *, is_open: bool) -> Parser:
        """Its pieces are Reasoning and Content; what is Content goes on to the tool parser."""


class ToolFormat(Protocol):
    """How calls are written."""

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether tags are special tokens, which must then be part of the text."""

    def parser(self, tools: Sequence[Tool]) -> Parser:
        """Its pieces are Content, CallBegin and CallArguments. What is no call of one of `tools` stays Content."""

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        """The calls as a grammar, in the words of a structural tag: {"type": "structural_tag", "format": {...}}.

        Text is free until a call begins; `at_least_one`: there is no text before it, and there must be one.
        """
