"""Every message that crosses a process border, and the sockets it crosses by.

Three processes, one direction per group:

    TokenizerManager --SchedulerInput--> Scheduler --DetokenizerInput--> Detokenizer --TokenizerInput--> TokenizerManager
                                             `-----------TokenizerInput (control replies)----------------------^

Messages are msgspec structs, tagged by class name, sent as msgpack over ZMQ PUSH/PULL ipc sockets; NumPy arrays travel as
their raw bytes. Nothing read from a socket is ever unpickled or evaluated.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from jaxserve.types import FinishReason, SamplingParams


class Message(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages. The tag (the class name) is what a receiver dispatches on."""


# --- TokenizerManager -> Scheduler ---------------------------------------------------------------------------------------


class TokenizedGenerateReqInput(Message):
    """One sequence to generate. A request with n > 1 arrives as n of these, each with its own rid."""

    rid: str
    input_ids: np.ndarray  # int32 [prompt_len]
    sampling_params: SamplingParams  # verified; n is 1
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = 0
    priority: int | None = None
    extra_key: str | None = None  # radix cache namespace (extra_key and cache_salt joined)
    received_time_s: float = 0.0  # time.time() when the HTTP server saw it


class BatchTokenizedGenerateReqInput(Message):
    batch: list[TokenizedGenerateReqInput]


class AbortReq(Message):
    """Aborts every request whose rid starts with `rid`, or all of them. Each still gets its one terminal message."""

    rid: str = ""
    exact: bool = False  # only the request of exactly this rid (a client left; its rid may begin another's)
    abort_all: bool = False


class FlushCacheReqInput(Message):
    request_id: str
    timeout_s: float = 0.0  # > 0: wait this long for the scheduler to become idle


class GetInternalStateReq(Message):
    request_id: str


class ShutdownReq(Message):
    """No more requests follow: the scheduler finishes what it holds, passes this on to the detokenizer, and both exit 0."""


# --- Scheduler -> Detokenizer (BatchTokenIDOut, ShutdownReq) and Detokenizer -> TokenizerManager (BatchStrOut) --------------


class OutputLogprobs(Message):
    """Of the tokens in one output message, in order. k is the request's top_logprobs_num."""

    logprobs: np.ndarray  # float32 [new_tokens]
    top_ids: np.ndarray | None = None  # int32 [new_tokens, k]
    top_logprobs: np.ndarray | None = None  # float32 [new_tokens, k]


class RequestTimes(Message):
    """Unix times of a finished request's life in the scheduler, and what happened to it there."""

    queue_entry_s: float
    first_scheduled_s: float
    first_token_s: float
    finished_s: float
    num_retractions: int = 0
    verify_steps: int = 0  # steps that verified drafts for it
    proposed_drafts: int = 0  # in those steps, as many as fit
    accepted_drafts: int = 0


# Bits of BatchTokenIDOut.decode_flags.
SKIP_SPECIAL_TOKENS = 1
SPACES_BETWEEN_SPECIAL_TOKENS = 2
NO_STOP_TRIM = 4

PROMPT_TAIL_LEN = 5


class BatchTokenIDOut(Message):
    """New tokens of many requests. Row i of every array belongs to rids[i]; token ids are concatenated in that order."""

    rids: list[str]
    token_ids: np.ndarray  # int32 [sum(token_counts)], tokens not sent before
    token_counts: np.ndarray  # int32 [n]; 0 is legal (an abort before the first token)
    decode_flags: np.ndarray  # uint8 [n]
    prompt_tokens: np.ndarray  # int32 [n]
    completion_tokens: np.ndarray  # int32 [n], so far
    cached_tokens: np.ndarray  # int32 [n]
    finished: dict[int, FinishReason] = {}  # by index; a request that appears here is never sent again
    logprobs: dict[int, OutputLogprobs] = {}
    times: dict[int, RequestTimes] = {}  # of the finished ones
    # Stop strings by index, in a request's first message: text that may be the beginning of one is not sent out early.
    stops: dict[int, list[str]] = {}
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
    finished: dict[int, FinishReason] = {}
    logprobs: dict[int, OutputLogprobs] = {}
    times: dict[int, RequestTimes] = {}


# --- Scheduler or Detokenizer -> TokenizerManager -------------------------------------------------------------------------


class FlushCacheReqOutput(Message):
    request_id: str
    success: bool
    message: str = ""


class GetInternalStateReqOutput(Message):
    request_id: str
    state: dict[str, Any]


class WorkerReady(Message):
    """A worker process finished its start-up. `info` is shown by /server_info."""

    worker: str  # "scheduler" | "detokenizer"
    info: dict[str, Any] = {}


class WorkerFailed(Message):
    """A worker's last words; its process exits non-zero right after."""

    worker: str
    error: str  # one sentence for the terminal
    is_user_error: bool = False  # a bad flag or checkpoint: no traceback wanted


SchedulerInput = (
    TokenizedGenerateReqInput
    | BatchTokenizedGenerateReqInput
    | AbortReq
    | FlushCacheReqInput
    | GetInternalStateReq
    | ShutdownReq
)
DetokenizerInput = BatchTokenIDOut | ShutdownReq
TokenizerInput = BatchStrOut | FlushCacheReqOutput | GetInternalStateReqOutput | WorkerReady | WorkerFailed


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
