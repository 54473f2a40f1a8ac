"""GeneratorParser: a Parser written as one generator over the message."""

from __future__ import annotations

import copy

from jaxserve.parsers.output import Output
from jaxserve.parsers.pieces import Piece
from jaxserve.parsers.reader import Read, Reader


class GeneratorParser:
    def __init__(self) -> None:
        self.reader = Reader()
        self.out = Output()
        self._reading: Read[None] | None = None

    def feed(self, text: str) -> list[Piece]:
        self.reader.push(text)
        return self._read_on()

    def finish(self) -> list[Piece]:
        self.reader.end()
        pieces = self._read_on()
        self.out.finish()
        return pieces + self.out.take()

    def _read_on(self) -> list[Piece]:
        if self._reading is None:
            self._reading = copy.copy(self)._message()  # of its own: else parser and generator would refer to each other
        next(self._reading, None)
        return self.out.take()

    def _message(self) -> Read[None]:
        raise NotImplementedError
