"""PacedStream: a reply of events that may be long work, such as the logprobs of a long prompt.

    pulled chunks -> PartsWriter.parts, in a thread if it is much -> blocks -> Wire.write

Nothing happens on the loop meanwhile that others would have to wait for. Chunks that come while one is worked on, or while the
connection cannot take more, are merged.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Protocol

from starlette.types import Receive, Scope, Send

from jaxserve.server.elsewhere import AnsweredElsewhere
from jaxserve.server.http.errors import as_request_error, error_response
from jaxserve.server.http.event_stream import EventReply, EventWriter
from jaxserve.server.http.wire import Outlet, wire_of
from jaxserve.server.long_json import blocks_of
from jaxserve.server.requests import GenerationChunk
from jaxserve.server.text_lanes import CHARS_PER_NUMBER, TextLanes


class PartsWriter(EventWriter, Protocol):
    def parts(self, chunk: GenerationChunk) -> Iterable[bytes]:
        """What `push` says, in parts."""

    def num_numbers(self, chunk: GenerationChunk) -> int:
        """Logprobs and the like that the events of this chunk will hold."""


class PacedStream(EventReply):
    def __init__(self, writer: PartsWriter, chunks: AsyncGenerator[GenerationChunk, None], lanes: TextLanes) -> None:
        super().__init__(writer)
        self._parts = writer
        self._chunks = chunks
        self._lanes = lanes

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire, outlet = wire_of(scope, send), None
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    weight = self._parts.num_numbers(chunk) * CHARS_PER_NUMBER
                    blocks = await self._lanes.run(weight, functools.partial(self._blocks, chunk))
                    if outlet is None:
                        await self._begin(wire, send)
                        outlet = Outlet(wire)
                    for block in blocks:
                        await outlet.write(block)
            last_words = self._writer.end()
        except AnsweredElsewhere:
            raise
        except Exception as error:
            told = as_request_error(error)
            if outlet is None:
                await error_response(scope["path"], told)(scope, receive, send)
                return
            last_words = self._writer.error(told)
        await wire.close()
        await send({"type": "http.response.body", "body": last_words, "more_body": False})

    def _blocks(self, chunk: GenerationChunk) -> list[bytes]:
        return blocks_of(self._parts.parts(chunk))
