"""One native request from its chunks to its replies: what POST /generate and the Engine share. No HTTP here.

A streamed reply repeats everything so far, as SGLang's does, unless `incremental_streaming_output` asks for what is new; the
replies to a list say by `index` which sequence they belong to.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

from jaxserve.config import ServerArgs
from jaxserve.server.native.logprobs import Pack, TokenText
from jaxserve.server.native.replies import GenerateReply, Reply
from jaxserve.server.native.request import NativeRequest
from jaxserve.server.request_checks import without_tokenizer
from jaxserve.server.requests import GenerationChunk, raise_if_failed
from jaxserve.server.text_lanes import CHARS_PER_NUMBER, TextLanes
from jaxserve.server.thinking_tokens import ThinkingTokens

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class NativeJob:
    native: NativeRequest
    args: ServerArgs
    token_text: TokenText  # used if logprobs are to come with the tokens' text
    pack: Pack | None = None  # for long lists in replies; None: they stay as they are
    count_thinking: Callable[[], ThinkingTokens] | None = None  # makes a sequence's counter; None: they do not think

    def __post_init__(self) -> None:
        if self.native.return_text_in_logprobs and self.args.skip_tokenizer_init:
            raise without_tokenizer("return_text_in_logprobs", param="return_text_in_logprobs")

    @property
    def shows_more(self) -> bool:
        """Replies hold logprobs, hidden states or experts."""
        return any(options.shows_more for options in self.native.req.options)

    async def whole(
        self, chunks: AsyncGenerator[GenerationChunk, None], lanes: TextLanes, shape: Callable[[Reply | list[Reply]], T]
    ) -> T:
        """What `shape` makes of the finished reply, or of a list of them if a list was asked for."""
        replies = GrowingReplies(self, with_index=False)
        async with aclosing(chunks):
            async for chunk in chunks:
                if self.shows_more:
                    await lanes.run(chunk.num_numbers * CHARS_PER_NUMBER, functools.partial(replies.add, chunk))
                else:
                    replies.add(chunk)

        def finished() -> T:
            shaped = replies.finished()
            return shape(shaped if self.native.is_list else shaped[0])

        return await lanes.run(replies.num_numbers * CHARS_PER_NUMBER, finished)

    def streamed(self) -> GrowingReplies:
        return GrowingReplies(self, with_index=self.native.is_list)


class GrowingReplies:
    """The replies of a request's sequences. They come into being with their first chunk: before it, nobody has checked how many
    sequences were asked for."""

    def __init__(self, job: NativeJob, with_index: bool) -> None:
        self._job = job
        self._with_index = with_index
        self._incremental = job.args.incremental_streaming_output
        self._replies: dict[int, GenerateReply] = {}
        self.num_numbers = 0  # logprobs, components of hidden states and experts so far

    def add(self, chunk: GenerationChunk) -> GenerateReply:
        """The reply that has just grown. Raises RequestError if the server failed to serve it."""
        if chunk.finish_reason is not None:
            raise_if_failed(chunk)
        reply = self._replies.get(chunk.index)
        if reply is None:
            reply = self._replies[chunk.index] = self._begin(chunk.index)
        reply.add(chunk)
        if self._job.shows_more:
            self.num_numbers += chunk.num_numbers
        return reply

    def event(self, chunk: GenerationChunk) -> Reply:
        """What a stream says after a chunk."""
        reply = self.add(chunk)
        return reply.delta_dict() if self._incremental else reply.to_dict()

    def finished(self) -> list[Reply]:
        return [self._replies[index].to_dict() for index in sorted(self._replies)]

    def _begin(self, index: int) -> GenerateReply:
        native = self._job.native
        prompt_ids = native.req.prompt_ids[index // native.req.num_samples] if native.return_prompt_token_ids else None
        return GenerateReply(
            native.req.options_of(index),
            weight_version=self._job.args.weight_version,
            token_text=self._job.token_text if native.return_text_in_logprobs else None,
            prompt_ids=None if prompt_ids is None else prompt_ids.tolist(),
            index=index if self._with_index else None,
            pack=self._job.pack,
            thinking=None if self._job.count_thinking is None else self._job.count_thinking(),
        )
