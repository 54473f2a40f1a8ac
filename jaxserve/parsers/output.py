"""Output: the pieces that a parser has read. White space around a tag belongs to the tag and is left out."""

from __future__ import annotations

from jaxserve.parsers.pieces import CallArguments, CallBegin, Content, Piece, Reasoning


class Output:
    def __init__(self) -> None:
        self.num_calls = 0
        self._pieces: list[Piece] = []
        self._parts: list[str] = []  # of the piece being made, as `_kind` says
        self._kind: type[Reasoning] | type[Content] | type[CallArguments] = Content
        self._space: list[str] = []  # behind the text so far: part of it only if more text follows
        self._space_kind: type[Reasoning] | type[Content] = Content
        self._is_after_tag = False

    def content(self, text: str) -> None:
        self._text(Content, text)

    def reasoning(self, text: str) -> None:
        self._text(Reasoning, text)

    def tag(self) -> None:
        self._space.clear()
        self._is_after_tag = True

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        self.tag()
        self._close_piece()
        self._pieces.append(CallBegin(self.num_calls, name, call_id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Of the call begun last."""
        self._part(CallArguments, text)

    def finish(self) -> None:
        """The message is over: no tag follows."""
        for text in self._space:
            self._part(self._space_kind, text)
        self._space.clear()

    def take(self) -> list[Piece]:
        self._close_piece()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _text(self, kind: type[Reasoning] | type[Content], text: str) -> None:
        if self._is_after_tag:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self._is_after_tag = False
            self.finish()
            self._part(kind, body)
        if len(body) < len(text):
            self._space.append(text[len(body) :])
            self._space_kind = kind

    def _part(self, kind: type[Reasoning] | type[Content] | type[CallArguments], text: str) -> None:
        if kind is not self._kind:
            self._close_piece()
            self._kind = kind
        if text:
            self._parts.append(text)

    def _close_piece(self) -> None:
        if not self._parts:
            return
        text = "".join(self._parts)
        self._parts.clear()
        kind = self._kind
        self._pieces.append(CallArguments(self.num_calls - 1, text) if issubclass(kind, CallArguments) else kind(text))
