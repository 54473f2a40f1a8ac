"""Rollouts: the samples of a batch of prompts as padded arrays, as a training program takes them.

    RolloutJob.plan -> Generation.stream -> RolloutSink.push -> RolloutJob.rollouts

Tokens and logprobs stay the arrays that the scheduler's messages brought (`GenerateReqInput.as_arrays`); they are put together
once, when the samples have ended. Nothing here is done for each token. It knows no Engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import msgspec
import numpy as np

from jaxserve.server.native.conversion import convert
from jaxserve.server.native.positions import generate_body
from jaxserve.server.native.request import build_generate_request
from jaxserve.server.requests import GenerateReqInput, GenerationChunk, RequestError, TokenPart, raise_if_failed
from jaxserve.types import SamplingParams

FINISH_TYPES = ("stop", "length", "abort")
_NO_TOKENS = np.zeros(0, np.int32)
_NO_LOGPROBS = np.zeros(0, np.float32)


class RolloutOptions(TypedDict, total=False):
    """Keyword arguments of `Engine.rollout` and its kin."""

    input_ids: Any  # the prompts as ids, in place of texts: a list of them, or of lists or arrays of them
    n: int | None  # samples of each prompt; None: as the sampling parameters say
    logprobs: bool  # of the tokens that were drawn; True by default
    routed_experts: bool  # of prompts and samples, from a server with --enable-return-routed-experts; False by default
    progress: bool  # a bar on stderr
    pad_token_id: int | None  # None: the tokenizer's; 0 where it has none
    max_len: int | None  # width of `tokens`, and the most new tokens; None: as long as the longest
    max_prompt_len: int | None  # width of `prompt_tokens`; a longer prompt is refused; None: as long as the longest
    lora_path: str | list[str | None] | None  # the name of an adapter, or one for each prompt


@dataclasses.dataclass(frozen=True, eq=False)
class Rollouts:
    """Of P prompts n samples each: N = P * n rows, of which row p * n + j is sample j of prompt p.

    Prompts are padded on the left and samples on the right, so that they meet: `sequences`.
    """

    prompt_tokens: np.ndarray  # int32 [P, prompt width]
    prompt_lengths: np.ndarray  # int32 [P]
    tokens: np.ndarray  # int32 [N, width]: what was drawn, a token that ended it included
    lengths: np.ndarray  # int32 [N]
    logprobs: np.ndarray | None  # float32 [N, width], 0 behind a sample's end; None: they were not asked for
    finishes: np.ndarray  # int8 [N]: place in FINISH_TYPES
    texts: list[str]  # without what a stop string cut off; empty ones where the engine has no tokenizer
    versions: list[str]  # of weights: all that drew something, in the order in which they are met
    token_versions: np.ndarray  # int32 [N, width]: of each token, its weights' place in `versions`; -1 behind a sample's end
    num_samples: int  # n
    pad_token_id: int
    # Of each row int32 [its prompt + its length - 1, layers with experts, K]: those of its tokens, prompt and sample, but the
    # last. None: they were not asked for.
    routed_experts: list[np.ndarray] | None = None

    def __len__(self) -> int:
        """Rows."""
        return len(self.tokens)

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_tokens)

    @property
    def mask(self) -> np.ndarray:
        """bool [N, width]: what is no padding."""
        return _left_of(self.lengths, self.tokens.shape[1])

    @property
    def prompt_mask(self) -> np.ndarray:
        """bool [P, prompt width]: what is no padding."""
        return _left_of(self.prompt_lengths, self.prompt_tokens.shape[1])[:, ::-1]

    @property
    def sequences(self) -> np.ndarray:
        """int32 [N, prompt width + width]: each prompt once for each of its samples, and the sample behind it."""
        return np.concatenate([self.prompt_tokens.repeat(self.num_samples, axis=0), self.tokens], axis=1)

    @property
    def weight_versions(self) -> list[str]:
        """Of the weights that drew each row's last token; empty for a row without any."""
        rows = zip(self.token_versions, self.lengths.tolist(), strict=True)
        return [self.versions[versions[length - 1]] if length else "" for versions, length in rows]

    @property
    def finish_reasons(self) -> list[str]:
        """ "stop", "length" or "abort", of each row."""
        return [FINISH_TYPES[code] for code in self.finishes.tolist()]


@dataclasses.dataclass(slots=True)
class _Row:
    """What a sequence has become."""

    parts: list[TokenPart] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    experts: list[np.ndarray] = dataclasses.field(default_factory=list)
    last: GenerationChunk | None = None  # once it has ended


class RolloutSink:
    """Keeps what the chunks of a request bring."""

    def __init__(
        self, num_prompts: int, num_samples: int, *, on_row: Callable[[], object], on_group: Callable[[int], object]
    ) -> None:
        """`on_row` is called as each sequence ends, `on_group` with the number of each prompt of which all samples have ended;
        after a failure with the prompt that failed, and never again."""
        self._num_samples = num_samples
        self._rows = {index: _Row() for index in range(num_prompts * num_samples)}
        self._unfinished = [num_samples] * num_prompts
        self._num_unfinished = num_prompts * num_samples
        self._on_row = on_row
        self._on_group = on_group
        self._failure: GenerationChunk | None = None
        self.num_tokens = 0  # of the sequences that have ended

    @property
    def is_over(self) -> bool:
        """Nothing comes any more, or nothing that is wanted."""
        return self._failure is not None or not self._num_unfinished

    def push(self, chunk: GenerationChunk) -> None:
        if self._failure is not None:
            return
        row = self._rows[chunk.index]
        row.parts.extend(chunk.parts)
        row.experts.extend(chunk.experts)
        if chunk.text:
            row.texts.append(chunk.text)
        if (reason := chunk.finish_reason) is None:
            return
        row.last = chunk
        self.num_tokens += chunk.completion_tokens
        self._num_unfinished -= 1
        self._on_row()
        prompt = chunk.index // self._num_samples
        self._unfinished[prompt] -= 1
        if reason.type == "abort" and reason.status_code is not None:
            self._failure = chunk
        if not self._unfinished[prompt] or self._failure is not None:
            self._on_group(prompt)

    def end(self) -> None:
        pass

    def check(self) -> None:
        """Raises RequestError if a sequence could not be served."""
        if self._failure is not None:
            raise_if_failed(self._failure)

    def take(self, prompts: range) -> list[_Row]:
        """The rows of prompts whose samples have all ended. They are kept no longer."""
        n = self._num_samples
        return [self._rows.pop(index) for index in range(prompts.start * n, prompts.stop * n)]


@dataclasses.dataclass(frozen=True)
class RolloutJob:
    req: GenerateReqInput
    pad_token_id: int
    max_len: int | None = None
    max_prompt_len: int | None = None
    progress: bool = False

    @staticmethod
    def plan(
        prompts: Any,
        sampling_params: Any,
        *,
        preferred_sampling_params: str | None,
        default_pad_token_id: int,
        input_ids: Any = None,
        n: int | None = None,
        logprobs: bool = True,
        routed_experts: bool = False,
        progress: bool = False,
        pad_token_id: int | None = None,
        max_len: int | None = None,
        max_prompt_len: int | None = None,
        lora_path: str | list[str | None] | None = None,
    ) -> RolloutJob:
        """See RolloutOptions; `preferred_sampling_params` is the option of that name. Raises RequestError."""
        fields = {"return_logprob": logprobs, "return_routed_experts": routed_experts, "lora_path": lora_path}
        body: Mapping[str, Any] = generate_body(prompts, sampling_params, input_ids, (), fields)
        req = build_generate_request(body, preferred_sampling_params).req
        req.as_arrays = True
        width, prompt_width = _width("max_len", max_len), _width("max_prompt_len", max_prompt_len)
        wanted = None if n is None else convert(n, int, "n")
        if width is not None and all(params.max_new_tokens is None for params in req.sampling_params):
            req.cuts_new_tokens = True  # as far as the context goes, then as now
        fitted = {id(params): _fitted(params, wanted, width) for params in req.sampling_params}
        req.sampling_params = [fitted[id(params)] for params in req.sampling_params]
        pad = default_pad_token_id if pad_token_id is None else convert(pad_token_id, int, "pad_token_id")
        return RolloutJob(req, pad, width, prompt_width, progress)

    @property
    def prompts(self) -> range:
        return range(self.req.num_prompts)

    def sink(self, *, on_row: Callable[[], object], on_group: Callable[[int], object]) -> RolloutSink:
        return RolloutSink(self.req.num_prompts, self.req.num_samples, on_row=on_row, on_group=on_group)

    def check_prompt_lens(self) -> None:
        """Once they are tokenized. Raises RequestError for one that is too long."""
        longest = max(map(len, self.req.prompt_ids))
        if self.max_prompt_len is not None and longest > self.max_prompt_len:
            message = f"A prompt may have at most max_prompt_len, {self.max_prompt_len}, tokens; one has {longest}."
            raise RequestError(message, param="max_prompt_len")

    def rollouts(self, sink: RolloutSink, prompts: range) -> Rollouts:
        """Of prompts whose samples have all ended."""
        rows = sink.take(prompts)
        prompt_ids = self.req.prompt_ids[prompts.start : prompts.stop]
        prompt_lengths = _lengths(prompt_ids)
        parts = [part for row in rows for part in row.parts]
        part_lens = np.array([len(part.token_ids) for part in parts], np.int64)
        numbers = {version: number for number, version in enumerate(dict.fromkeys(part.weight_version for part in parts))}
        part_versions = np.array([numbers[part.weight_version] for part in parts], np.int32)
        lengths = np.array([sum(len(part.token_ids) for part in row.parts) for row in rows], np.int32)
        width = _widest(lengths) if self.max_len is None else self.max_len
        prompt_width = _widest(prompt_lengths) if self.max_prompt_len is None else self.max_prompt_len
        mask, prompt_mask = _left_of(lengths, width), _left_of(prompt_lengths, prompt_width)[:, ::-1]
        token_ids = np.concatenate([_NO_TOKENS, *(part.token_ids for part in parts)])
        logprobs = None
        if self.req.options[0].return_logprob:
            given = (part.logprobs.logprobs for part in parts if part.logprobs is not None)
            logprobs = _spread(np.concatenate([_NO_LOGPROBS, *given]), mask, 0.0)
        ends = [row.last for row in rows if row.last is not None]
        assert len(ends) == len(rows), f"{len(rows) - len(ends)} samples of prompts {prompts} have not ended"
        return Rollouts(
            prompt_tokens=_spread(np.concatenate(prompt_ids), prompt_mask, self.pad_token_id),
            prompt_lengths=prompt_lengths,
            tokens=_spread(token_ids, mask, self.pad_token_id),
            lengths=lengths,
            logprobs=logprobs,
            finishes=np.array([FINISH_TYPES.index(end.finish_reason.type) for end in ends if end.finish_reason], np.int8),
            texts=["".join(row.texts) for row in rows],
            versions=list(numbers),
            token_versions=_spread(np.repeat(part_versions, part_lens).astype(np.int32), mask, -1),
            num_samples=self.req.num_samples,
            pad_token_id=self.pad_token_id,
            routed_experts=[_joined(row.experts) for row in rows] if self.req.options[0].return_routed_experts else None,
        )


def _width(name: str, value: int | None) -> int | None:
    if value is not None and convert(value, int, name) < 1:
        raise RequestError(f"{name} must be at least 1, got {value}.", param=name)
    return value


def _fitted(params: SamplingParams, n: int | None, max_len: int | None) -> SamplingParams:
    """With so many samples, and none of them longer."""
    most = params.max_new_tokens
    if max_len is not None and most is not None and most > max_len:
        raise RequestError(f"max_new_tokens may be at most max_len, {max_len}, got {most}.", param="max_new_tokens")
    return msgspec.structs.replace(params, n=params.n if n is None else n, max_new_tokens=max_len if most is None else most)


def _lengths(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.fromiter(map(len, rows), np.int32, len(rows))


def _widest(lengths: np.ndarray) -> int:
    return int(lengths.max(initial=0))


def _joined(experts: Sequence[np.ndarray]) -> np.ndarray:
    """Of a row that ended before anything was computed there are none."""
    return np.concatenate(experts) if experts else np.zeros((0, 0, 0), np.int32)


def _left_of(lengths: np.ndarray, width: int) -> np.ndarray:
    """bool [rows, width]: the first `lengths` of each row."""
    return np.arange(width) < lengths[:, None]


def _spread(values: np.ndarray, mask: np.ndarray, elsewhere: float) -> np.ndarray:
    """`values` of all rows, one row after the other, where the mask is; [rows, width]."""
    spread = np.full(mask.shape, elsewhere, values.dtype)
    spread[mask] = values
    return spread
