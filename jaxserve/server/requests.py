"""What a user asked for, before tokenizing, and what comes back, before a protocol shapes it.

Every front door (native routes, OpenAI routes, Engine) builds a GenerateReqInput and reads GenerationChunks; only the
TokenizerManager stands between them. No HTTP here, no sockets.
"""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from jaxserve.messages import HiddenStates, InputLogprobs, TokenLogprobs
from jaxserve.types import FinishReason, SamplingParams, Thinking

# HTTP status -> SGLang's name of the error.
ERR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class RequestError(ValueError):  # as SGLang's Engine raises
    """A request that cannot be served: the HTTP status and one sentence for the user."""

    def __init__(
        self,
        message: str,
        status_code: int = 400,
        err_type: str = "BadRequestError",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status_code = status_code
        self.err_type = err_type
        self.param = param  # the field at fault, for OpenAI's envelope
        self.code = code  # OpenAI's machine-readable code, such as model_not_found


class SessionParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request goes on from an earlier one of its session."""

    id: str
    rid: str | None = None  # of the turn it goes on from; None: from none (of a streaming session: from the newest)
    offset: int | None = None  # of that turn's tokens so many are kept, or, negative, so many are not; None and 0: all are
    replace: bool | None = None  # what followed that turn (without a rid: everything) is dropped, and aborted if it runs
    drop_previous_output: bool | None = None  # what that turn generated is not kept


class PromptOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What may be asked for beside sampling parameters, for each prompt of a request apart. Immutable: prompts share them.

    The names, types and defaults are those of the fields of /generate, which take one value for all prompts or a list of them.
    """

    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    token_ids_logprob: tuple[int, ...] | None = None
    return_hidden_states: bool | Literal["last"] = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    session_params: SessionParams | None = None
    priority: int | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_path: str | None = None  # the name of a LoRA adapter (SGLang's field); None and "": the model as it is
    custom_logit_processor: str | None = None  # a name, or code
    max_thinking_tokens: int | None = None

    @property
    def shows_more(self) -> bool:
        """The reply holds more than tokens: many numbers, perhaps."""
        return bool(self.return_logprob or self.return_hidden_states or self.return_routed_experts)


class PromptEmbeds:
    """A prompt that is given as embeddings."""

    __slots__ = ("key", "length", "values", "width")

    def __init__(self, values: np.ndarray, key: str) -> None:
        """`values` float32 [length, width], finite. `key`: of these very values, and of no others."""
        self.values: np.ndarray | None = values  # until they were sent: they are large
        self.length, self.width = values.shape
        self.key = key

    @property
    def nbytes(self) -> int:
        return 4 * self.length * self.width


class TextPair(NamedTuple):
    """Two texts that a model reads together, as a question and a passage."""

    first: str
    second: str


@dataclasses.dataclass(kw_only=True)
class GenerateReqInput:
    """One or many prompts. Exactly one of `prompts`, `pairs`, `input_ids` and `input_embeds` is set; each is a list, one
    entry per prompt.

    So are `sampling_params`, which all share the same n, and `options`. Prompt i's samples are sequences i*n .. i*n+n-1.
    """

    prompts: list[str] | None = None
    pairs: list[TextPair] | None = None  # of models that make vectors
    input_ids: list[list[int]] | None = None
    input_embeds: list[PromptEmbeds] | None = None
    sampling_params: list[SamplingParams]
    rids: list[str] | None = None  # one per prompt; drawn if absent; sample j of n > 1 gets the suffix _j
    options: list[PromptOptions] = dataclasses.field(default_factory=list)  # empty: the defaults for every prompt
    stream: bool = False
    pools: bool = False  # vectors of the prompts are wanted, and no tokens: max_new_tokens is 0
    # Where it pools: what is longer is cut to so many tokens, or to as many as the model takes (-1). None: as the server's
    # options say.
    truncate_prompt_tokens: int | None = None
    thinking: Thinking | None = None  # of every prompt's output; where there is a grammar, it begins behind the thinking
    # max_new_tokens beyond what the context has room for is no error: clients of some protocols always ask for many.
    cuts_new_tokens: bool = False
    data_parallel_rank: int | None = None  # of the replica that serves it; None: the controller chooses
    is_health_check: bool = False
    as_arrays: bool = False  # chunks bring tokens and logprobs as the arrays they came in (`parts`), not as lists
    trace_headers: dict[str, str] | None = None  # traceparent and tracestate, in the body
    custom_labels: dict[str, str] | None = None  # for the metrics about it, as far as the server takes them
    # int32, of each prompt, once they are tokenized; of embeddings NO_TOKEN_ID
    prompt_ids: list[np.ndarray] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.options:
            self.options = [PromptOptions()] * self.num_prompts

    @property
    def num_prompts(self) -> int:
        return len(self.prompts or self.pairs or self.input_ids or self.input_embeds or [])

    @property
    def num_samples(self) -> int:
        """n: sequences per prompt."""
        return self.sampling_params[0].n

    def options_of(self, sequence: int) -> PromptOptions:
        """Those of the prompt that a sequence belongs to."""
        return self.options[sequence // self.num_samples]

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.num_samples


@dataclasses.dataclass(slots=True)
class TokenLogprob:
    token_id: int
    logprob: float | None  # None for the first token of a prompt: then there is nothing else either
    top: list[tuple[int, float]]  # (token id, logprob), descending; empty unless top_logprobs_num > 0
    id_logprobs: list[float] = dataclasses.field(default_factory=list)  # of the request's token_ids_logprob


class TokenPart(NamedTuple):
    """Some tokens of a sequence, as they came."""

    token_ids: np.ndarray  # int32 [n]
    logprobs: TokenLogprobs | None  # of these tokens, if return_logprob
    weight_version: str = ""  # of the weights that drew them


class GenerationChunk(msgspec.Struct, gc=False):  # made once per token and sequence, and part of no cycle
    """What one sequence gained since its last chunk. The chunk with a finish_reason is the sequence's last."""

    index: int  # sequence number, see GenerateReqInput
    rid: str
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]  # one per token of token_ids if return_logprob, else empty
    prompt_tokens: int
    completion_tokens: int  # so far
    cached_tokens: int
    finish_reason: FinishReason | None = None
    meta: dict[str, Any] = {}  # last chunk: e2e_latency, queue_time, num_retractions, ...
    weight_version: str = ""  # of the weights it was computed with; empty if it never came to that
    input_logprobs: InputLogprobs | None = None  # of prompt tokens, once, if they were asked for
    hidden_states: list[HiddenStates] = []  # what the chunk's tokens add to them, as it came, if they were asked for
    experts: list[np.ndarray] = []  # int32 [n, layers, K]: what the chunk's tokens add to them, likewise
    pooled: np.ndarray | None = None  # float32 [1, size], or [prompt_len, size]: of a request that pools, in its last chunk
    parts: list[TokenPart] = []  # its tokens, of a request `as_arrays`: then token_ids and logprobs are empty

    @property
    def num_numbers(self) -> int:
        """Logprobs, components of hidden states and experts that it brings."""
        count = sum(1 + len(entry.top) + len(entry.id_logprobs) for entry in self.logprobs)
        if self.input_logprobs is not None:
            count += self.input_logprobs.logprobs.num_numbers
        return count + sum(states.num_numbers for states in self.hidden_states) + sum(part.size for part in self.experts)


def raise_if_failed(chunk: GenerationChunk) -> None:
    """An abort that carries a status is the server's failure to serve; one without was asked for and is an ordinary end."""
    reason = chunk.finish_reason
    if reason is not None and reason.type == "abort" and reason.status_code is not None:
        err_type = reason.err_type or ERR_TYPES.get(reason.status_code, "InternalServerError")
        raise RequestError(reason.message or "The request was aborted.", reason.status_code, err_type)


def expanded_rids(rid: str | list[str] | None, count: int, *, is_batch: bool) -> list[str] | None:
    """Of the prompts. A single rid of several is expanded: rid_0, rid_1, ..."""
    if rid is None or isinstance(rid, list):
        return rid
    return [f"{rid}_{i}" for i in range(count)] if is_batch and rid else [rid] * count


def new_rid() -> str:
    return uuid.uuid4().hex
