"""One native request from its chunks to its replies: what POST /generate and the Engine share. No HTTP here.

A streamed reply repeats everything so far, as SGLang's does, unless `incremental_streaming_output` asks for what is new; the
replies to a list say by `index` which sequence they belong to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from jaxserve.config import ServerArgs
from jaxserve.server.native.replies import GenerateReply, Reply, TokenText
from jaxserve.server.native.request import NativeRequest
from jaxserve.server.requests import GenerateReqInput, GenerationChunk, raise_if_failed


@dataclasses.dataclass(frozen=True)
class NativeJob:
    native: NativeRequest
    args: ServerArgs
    generate: Callable[[GenerateReqInput], AsyncGenerator[GenerationChunk, None]]  # the TokenizerManager's
    token_text: TokenText  # used if logprobs are to come with the tokens' text

    async def whole(self) -> Reply | list[Reply]:
        """The finished reply, or a list of them if a list was asked for."""
        replies: dict[int, GenerateReply] = {}
        async with aclosing(self._grow(replies, with_index=False)) as grown:
            async for _ in grown:
                pass
        shaped = [replies[index].to_dict() for index in sorted(replies)]
        return shaped if self.native.is_list else shaped[0]

    async def events(self) -> AsyncGenerator[Reply, None]:
        """A reply after each chunk."""
        incremental = self.args.incremental_streaming_output
        async with aclosing(self._grow({}, with_index=self.native.is_list)) as grown:
            async for reply in grown:
                yield reply.delta_dict() if incremental else reply.to_dict()

    async def _grow(self, replies: dict[int, GenerateReply], with_index: bool) -> AsyncGenerator[GenerateReply, None]:
        """The reply that has just grown, again and again. They come into being with their first chunk: before it, nobody
        has checked how many sequences were asked for."""
        async with aclosing(self.generate(self.native.req)) as chunks:
            async for chunk in chunks:
                raise_if_failed(chunk)
                reply = replies.get(chunk.index)
                if reply is None:
                    reply = replies[chunk.index] = self._reply(chunk.index, with_index)
                reply.add(chunk)
                yield reply

    def _reply(self, index: int, with_index: bool) -> GenerateReply:
        req = self.native.req
        return GenerateReply(
            weight_version=self.args.weight_version,
            return_logprob=req.return_logprob,
            top_logprobs_num=req.top_logprobs_num,
            token_text=self.token_text if self.native.return_text_in_logprobs else None,
            index=index if with_index else None,
        )
