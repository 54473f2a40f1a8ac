"""Every message that crosses a process border, and the sockets it crosses by.

Three kinds of processes, one direction per group; there is a scheduler for each replica, and there may be several detokenizers
and several TokenizerManagers:

    TokenizerManager --SchedulerInput--> Scheduler --DetokenizerInput--> Detokenizer --TokenizerInput--> TokenizerManager
          |                                  `-----------TokenizerInput (control replies)----------------------^
          `----------------DetokenizerInput (control requests)----------------^

What an operator can ask of a running worker travels in two envelopes, ControlRequest and ControlReply; what is in them is
declared in `jaxserve.scheduler.control`, one file per request.

Messages are msgspec structs, tagged by class name, sent as msgpack over ZMQ PUSH/PULL ipc sockets; NumPy arrays travel as
their raw bytes. Nothing read from a socket is ever unpickled or evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from jaxserve.timeline import RequestTimes
from jaxserve.types import FinishReason, LogitRules, SamplingParams, Thinking

T = TypeVar("T")


class Message(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages. The tag (the class name) is what a receiver dispatches on."""


class WorkerAddress(NamedTuple):
    """Which worker: of a kind there may be several, numbered from 0. One that is started again is another worker."""

    kind: str
    rank: int = 0
    start: int = 0  # how many with that rank there were before

    def __str__(self) -> str:
        """Whoever reads it knows ranks: of which start it is, is for machines."""
        return f"{self.kind} {self.rank}" if self.rank else self.kind


SCHEDULER = "scheduler"
DETOKENIZER = "detokenizer"
TOKENIZER = "tokenizer"  # the TokenizerManager in the main process
FRONT = "front"  # a TokenizerManager in a front process
HOST = "host"  # the one worker of a host that follows another


class Route(NamedTuple):
    """The way of a request's outputs from its scheduler to whoever asked."""

    detokenizer: int = 0  # rank of the detokenizer that makes its texts, all of them
    front: int | None = None  # rank of the front process that waits for them; None: the main process

    @property
    def reader(self) -> WorkerAddress:
        return WorkerAddress(TOKENIZER) if self.front is None else WorkerAddress(FRONT, self.front)


# --- control, to and from any worker --------------------------------------------------------------------------------------

_NOTHING = msgspec.Raw(b"\xc0")  # msgpack's nil


class ControlRequest(Message):
    request_id: str
    name: str  # of the declaration
    body: msgspec.Raw = _NOTHING  # its request struct, see `pack`


class ControlReply(Message):
    """One worker's answer. Every worker that is asked sends exactly one."""

    request_id: str
    worker: WorkerAddress
    body: msgspec.Raw = _NOTHING  # the declaration's reply struct, if there is no error
    error: str = ""  # one sentence
    status_code: int = 500  # of the error


# --- TokenizerManager -> Scheduler ---------------------------------------------------------------------------------------


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """One more sequence from a prompt."""

    rid: str
    sampling_seed: int | None = None


class TokenizedGenerateReqInput(Message):
    """One prompt and the sequence to generate from it; with n > 1 the further sequences stand in `more_samples`, so that the
    prompt crosses the process border once."""

    rid: str
    input_ids: np.ndarray  # int32 [prompt_len]
    sampling_params: SamplingParams  # verified; n is 1
    input_embeds: np.ndarray | None = None  # float32 [prompt_len, E]: the prompt is these, and its ids are NO_TOKEN_ID
    prompt_tail: list[int] = []  # in place of such a prompt's last ids: tokens behind which decoding goes on
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1  # the first prompt token whose logprob is wanted; -1: none
    token_ids_logprob: list[int] | None = None
    return_hidden_states: bool | Literal["last"] = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0  # the first prompt token whose experts are wanted
    pools: bool = False  # a vector is wanted (or one for each token), and no token: max_new_tokens is 0
    priority: int | None = None
    extra_key: str | None = None  # radix cache namespace (extra_key and cache_salt joined)
    lora_name: str | None = None  # of the LoRA adapter it runs with; None: the model as it is
    thinking: Thinking | None = None  # the output thinks first, and is not held to its grammar meanwhile
    logit_rules: LogitRules | None = None  # of its logit processors
    route: Route = Route()
    more_samples: list[Sample] = []

    def sequences(self) -> Iterator[TokenizedGenerateReqInput]:
        """One message per sequence; they share the prompt's array."""
        yield msgspec.structs.replace(self, more_samples=[]) if self.more_samples else self
        for sample in self.more_samples:
            params = self.sampling_params
            if params.sampling_seed != sample.sampling_seed:
                params = msgspec.structs.replace(params, sampling_seed=sample.sampling_seed)
            yield msgspec.structs.replace(self, rid=sample.rid, sampling_params=params, more_samples=[])


class BatchTokenizedGenerateReqInput(Message):
    batch: list[TokenizedGenerateReqInput]


class AbortReq(Message):
    """Nobody waits for these requests any more. Exactly these rids, each once: one may be the beginning of another's."""

    rids: list[str]


class ShutdownReq(Message):
    """No more requests follow: a scheduler finishes what it holds, passes this on to every detokenizer and exits 0; a
    detokenizer exits when it has one of every replica. For one that does not run, the TokenizerManager sends it."""


# --- Scheduler -> Detokenizer (BatchTokenIDOut, ShutdownReq) and Detokenizer -> TokenizerManager (BatchStrOut) --------------


class TokenLogprobs(Message):
    """Of n tokens, in order. k is the request's top_logprobs_num, I the number of its token_ids_logprob."""

    logprobs: np.ndarray  # float32 [n]
    top_ids: np.ndarray | None = None  # int32 [n, k]
    top_logprobs: np.ndarray | None = None  # float32 [n, k]
    id_logprobs: np.ndarray | None = None  # float32 [n, I]

    @property
    def num_numbers(self) -> int:
        return sum(part.size for part in (self.logprobs, self.top_logprobs, self.id_logprobs) if part is not None)


class InputLogprobs(Message):
    """Of the prompt's last tokens. The first of them has no logprob: nothing stands before it, or nobody asked about that."""

    token_ids: np.ndarray  # int32 [n]
    logprobs: TokenLogprobs  # of all but the first; of an aborted request there may be fewer


class HiddenStates(Message):
    """What a request's newest outputs add to its hidden states; E is the model's hidden size."""

    prompt: np.ndarray | None = None  # float32 [prompt_len, E], or [1, E] where only the last are wanted; once
    outputs: np.ndarray | None = None  # float32 [n, E]: of outputs behind which another was sampled

    @property
    def num_numbers(self) -> int:
        return sum(part.size for part in (self.prompt, self.outputs) if part is not None)


# Bits of BatchTokenIDOut.decode_flags.
SKIP_SPECIAL_TOKENS = 1
SPACES_BETWEEN_SPECIAL_TOKENS = 2
NO_STOP_TRIM = 4

PROMPT_TAIL_LEN = 5


class BatchTokenIDOut(Message):
    """New tokens of many requests with one route. Row i of every array belongs to rids[i]; token ids are concatenated in that
    order."""

    rids: list[str]
    token_ids: np.ndarray  # int32 [sum(token_counts)], tokens not sent before
    token_counts: np.ndarray  # int32 [n]; 0 is legal (an abort before the first token)
    decode_flags: np.ndarray  # uint8 [n]
    prompt_tokens: np.ndarray  # int32 [n]
    completion_tokens: np.ndarray  # int32 [n], so far
    cached_tokens: np.ndarray  # int32 [n]
    source: WorkerAddress = WorkerAddress(SCHEDULER)  # the scheduler that runs them
    route: Route = Route()
    weight_version: str = ""  # of the weights that all of this was computed with
    finished: dict[int, FinishReason] = {}  # by index; a request that appears here is never sent again
    logprobs: dict[int, TokenLogprobs] = {}  # of the new tokens
    input_logprobs: dict[int, InputLogprobs] = {}  # in a request's first message
    hidden_states: dict[int, HiddenStates] = {}
    experts: dict[int, np.ndarray] = {}  # int32 [n, layers, K], as HiddenStates goes on: first the prompt's, then outputs'
    pooled: dict[int, np.ndarray] = {}  # float32 [1, size], or [prompt_len, size], in a request's last message
    times: dict[int, RequestTimes] = {}  # of the finished ones
    # Stop strings and patterns by index, in a request's first message: text that may be the beginning of what they match is not
    # sent out early.
    stops: dict[int, list[str]] = {}
    stop_patterns: dict[int, list[str]] = {}
    # The prompt's last tokens (up to PROMPT_TAIL_LEN) by index, in a request's first message: whether the first word of the
    # answer begins with a space can depend on them.
    prompt_tails: dict[int, list[int]] = {}


class BatchStrOut(Message):
    """BatchTokenIDOut with the text those tokens added (a stop string and what follows it already trimmed)."""

    rids: list[str]
    texts: list[str]
    token_ids: np.ndarray
    token_counts: np.ndarray
    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray
    cached_tokens: np.ndarray
    source: WorkerAddress = WorkerAddress(SCHEDULER)
    weight_version: str = ""
    finished: dict[int, FinishReason] = {}
    logprobs: dict[int, TokenLogprobs] = {}
    input_logprobs: dict[int, InputLogprobs] = {}
    hidden_states: dict[int, HiddenStates] = {}
    experts: dict[int, np.ndarray] = {}
    pooled: dict[int, np.ndarray] = {}
    times: dict[int, RequestTimes] = {}
    # Requests that the detokenizer itself ended (they are in `finished`): the scheduler still runs them.
    abandoned: list[str] = []


# --- Scheduler or Detokenizer -> TokenizerManager -------------------------------------------------------------------------


class WorkerReady(Message):
    """A worker process finished its start-up. `info` is shown by /server_info."""

    worker: WorkerAddress
    info: dict[str, Any] = {}


class WorkerProgress(Message):
    """A worker that is ready goes on warming up: so many programs are still to be compiled."""

    worker: WorkerAddress
    programs_missing: int


class HostSpan(msgspec.Struct, array_like=True, gc=False):
    """What a process did while a profile was taken. Unix time."""

    name: str
    begin_ns: int
    end_ns: int
    count: int  # of what it did that to


class ProfileBegan(Message):
    """From here on every process that this comes through notes what it does."""

    source: WorkerAddress = WorkerAddress(SCHEDULER)


class ProfileEnded(Message):
    """What they noted, for the trace in the folder; it comes through the processes in the order of the work."""

    folder: str
    ended_ns: int  # Unix time; files took longer
    source: WorkerAddress = WorkerAddress(SCHEDULER)
    spans: dict[str, list[HostSpan]] = {}  # by process


class WorkerFailed(Message):
    """A worker's last words; its process exits non-zero right after."""

    worker: WorkerAddress
    error: str  # one sentence for the terminal
    is_user_error: bool = False  # a bad flag or checkpoint: no traceback wanted


SchedulerInput = TokenizedGenerateReqInput | BatchTokenizedGenerateReqInput | AbortReq | ControlRequest | ShutdownReq
DetokenizerInput = BatchTokenIDOut | ControlRequest | ProfileBegan | ProfileEnded | ShutdownReq
TokenizerInput = BatchStrOut | ControlReply | ProfileBegan | ProfileEnded | WorkerReady | WorkerProgress | WorkerFailed


def _array_to_wire(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).data.cast("B") if value.size else b"")
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent between processes")


def _array_from_wire(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"a message field of type {kind!r} cannot be received")
    dtype, shape, data = value
    if np.dtype(dtype).hasobject:
        raise TypeError("object arrays are not accepted")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_array_to_wire)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decoder(kinds: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder for one of the unions above. Arrays it returns are read-only views of the received frame."""
    return msgspec.msgpack.Decoder(kinds, dec_hook=_array_from_wire)


def pack(body: Any) -> msgspec.Raw:
    """What goes into the `body` of a control message: a struct, or a dataclass."""
    return msgspec.Raw(_encoder.encode(body))


def unpack(raw: msgspec.Raw, kind: type[T]) -> T:
    """Raises msgspec.ValidationError if `raw` is no `kind`."""
    body: T = decoder(kind).decode(raw)
    return body
