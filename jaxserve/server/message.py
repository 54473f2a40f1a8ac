"""A message read to its end, for replies in one piece, and the arguments of its calls as JSON. No protocol here."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from jaxserve.parsers.base import Parser
from jaxserve.parsers.pieces import Piece
from jaxserve.server.requests import GenerationChunk, TokenLogprob, raise_if_failed

# Under this name stand arguments that are no object, as Anthropic advises its users.
_INVALID = "INVALID_JSON"
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclasses.dataclass(frozen=True)
class WholeMessage:
    pieces: list[Piece]
    logprobs: list[TokenLogprob]
    last: GenerationChunk


async def whole_message(chunks: AsyncGenerator[GenerationChunk, None], parser: Parser) -> WholeMessage:
    """Of a request for one sequence. Raises RequestError if the server failed to serve it."""
    pieces: list[Piece] = []
    logprobs: list[TokenLogprob] = []
    last: GenerationChunk | None = None
    async with aclosing(chunks):
        async for last in chunks:
            raise_if_failed(last)
            pieces += parser.feed(last.text)
            logprobs += last.logprobs
    assert last is not None and last.finish_reason is not None, "a sequence has ended without its last chunk"
    return WholeMessage(pieces + parser.finish(), logprobs, last)


def arguments_object(text: str) -> msgspec.Raw:
    """The JSON of a call's arguments as it stands; of what was cut off or is no object, an object with the text."""
    try:
        _OBJECT.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode({_INVALID: text}))
    return msgspec.Raw((text or "{}").encode())
