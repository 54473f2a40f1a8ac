"""Counting and gathering the chunks of a request: usage in OpenAI's shape, and whole sequences for replies in one piece."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxserve.messages import HiddenStates, InputLogprobs
from jaxserve.server.openai.protocol import OpenAIRequest
from jaxserve.server.requests import GenerationChunk, TokenLogprob, raise_if_failed
from jaxserve.server.routed_experts import packed_experts
from jaxserve.server.text_lanes import CHARS_PER_NUMBER, TextLanes
from jaxserve.server.thinking_tokens import ThinkingTokens
from jaxserve.server.token_logprobs import logprobs_of_prompt
from jaxserve.types import FinishReason

T = TypeVar("T")


class Usage:
    """Token counts of a request so far, and what else is told of it as a whole. The n samples of one prompt share it: its
    tokens count once."""

    def __init__(
        self, num_samples: int, report_cached: bool, count_thinking: Callable[[], ThinkingTokens] | None = None
    ) -> None:
        """`count_thinking` makes what counts those of a sequence; None: there are none."""
        self._num_samples = num_samples
        self._report_cached = report_cached
        self._latest: dict[int, GenerationChunk] = {}  # by sequence
        self._experts: list[np.ndarray] = []  # of the first sequence, as they came
        self._thinking: defaultdict[int, ThinkingTokens] | None = None  # by sequence
        if count_thinking is not None:
            self._thinking = defaultdict(count_thinking)

    def add(self, chunk: GenerationChunk) -> None:
        self._latest[chunk.index] = chunk
        if chunk.experts and not chunk.index:
            self._experts.extend(chunk.experts)
        if self._thinking is not None:
            self._thinking[chunk.index].add(chunk.token_ids)

    def of_sequence(self, chunk: GenerationChunk) -> dict[str, Any]:
        """What stream_options.continuous_usage_stats puts into a chunk: the counts of that chunk's choice."""
        thinking = 0 if self._thinking is None else self._thinking[chunk.index].count
        return self._shape(chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens, thinking)

    def total(self) -> dict[str, Any]:
        chunks = self._latest.values()
        prompts = {chunk.index // self._num_samples: chunk.prompt_tokens for chunk in chunks}
        completion_tokens = sum(chunk.completion_tokens for chunk in chunks)
        thinking = sum(counter.count for counter in self._thinking.values()) if self._thinking is not None else 0
        return self._shape(sum(prompts.values()), completion_tokens, self._cached_tokens(), thinking)

    def sglext(self, request: OpenAIRequest) -> dict[str, Any]:
        """SGLang's, of what was asked for: the prompts' cached tokens by where they are kept, the experts of the first
        sequence."""
        told: dict[str, Any] = {}
        if request.return_routed_experts and self._experts:
            told["routed_experts"] = packed_experts(self._experts)
        if request.return_cached_tokens_details:
            told["cached_tokens_details"] = {"device": self._cached_tokens(), "host": 0}
        return told

    def _cached_tokens(self) -> int:
        return sum(chunk.cached_tokens for chunk in self._latest.values() if chunk.index % self._num_samples == 0)

    def _shape(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int, thinking: int) -> dict[str, Any]:
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens} if self._report_cached else None,
            "completion_tokens_details": {"reasoning_tokens": thinking},
            "reasoning_tokens": thinking,
        }


@dataclasses.dataclass
class Sequence:
    """All of one sequence. `last` is its final chunk."""

    texts: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    input_logprobs: InputLogprobs | None = None  # of the prompt, if they were asked for
    num_numbers: int = 0  # logprobs and the like
    hidden_states: HiddenStates | None = None  # the newest
    last: GenerationChunk | None = None

    @property
    def all_logprobs(self) -> Iterator[TokenLogprob]:
        """The prompt's, then the outputs'."""
        return itertools.chain(logprobs_of_prompt(self.input_logprobs), self.logprobs)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def finish_reason(self) -> FinishReason:
        assert self.last is not None, "a sequence is read before its last chunk"
        assert self.last.finish_reason is not None, f"the last chunk of {self.last.rid} has no finish reason"
        return self.last.finish_reason


async def gather(chunks: AsyncGenerator[GenerationChunk, None], usage: Usage) -> list[Sequence]:
    """Reads a request to its end. Raises RequestError if the server failed to serve any of its sequences."""
    # Not a list made beforehand: until the first chunk nobody has checked how many sequences were asked for.
    sequences: defaultdict[int, Sequence] = defaultdict(Sequence)
    async with aclosing(chunks):
        async for chunk in chunks:
            raise_if_failed(chunk)
            usage.add(chunk)
            sequence = sequences[chunk.index]
            sequence.texts.append(chunk.text)
            sequence.token_ids.extend(chunk.token_ids)
            sequence.input_logprobs = chunk.input_logprobs or sequence.input_logprobs
            sequence.logprobs.extend(chunk.logprobs)
            sequence.num_numbers += chunk.num_numbers
            if chunk.hidden_states:
                sequence.hidden_states = chunk.hidden_states[-1]
            sequence.last = chunk
    return [sequences[index] for index in sorted(sequences)]


async def shaped(lanes: TextLanes, sequences: list[Sequence], shape: Callable[[list[Sequence]], T]) -> T:
    """The reply that `shape` makes; in a thread if it is long."""
    weight = sum(sequence.num_numbers for sequence in sequences) * CHARS_PER_NUMBER
    return await lanes.run(weight, lambda: shape(sequences))


class Ending(NamedTuple):
    """How a choice ended, in the words of its reply."""

    finish_reason: str
    matched_stop: int | str | None

    @staticmethod
    def of(reason: FinishReason, *, has_calls: bool = False) -> Ending:
        """A message that ends by itself and calls tools ends because of these."""
        if reason.type != "stop":
            return Ending(reason.type, None)
        return Ending("tool_calls", None) if has_calls else Ending("stop", reason.matched_stop)
