"""What is sent and what came of it: plain data that goes to the client processes and comes back, as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

# A text, or a list: of token ids, or of the messages of a chat.
Content = str | list[Any]

# Kinds of failures that are not an HTTP status ("HTTP 503").
REFUSED = "connection refused"
CONNECTION = "connection failed"
TIMED_OUT = "timed out"
CUT = "stream cut"
IN_STREAM = "error in the stream"
ABORTED = "aborted by the server"
UNREADABLE = "unreadable reply"
# No failure of the server: Ctrl-C came first.
INTERRUPTED = "interrupted"


class Task(msgspec.Struct, kw_only=True):
    """One request, or a conversation: its turns are sent one behind the other, each with all that went before."""

    turns: list[Content]
    prompt_len: int  # tokens, of the first turn
    output_len: int  # tokens asked for, in each turn
    schema: dict[str, Any] | None = None  # that the answer has to obey
    arrival_s: float = 0.0  # after the start of the run
    lora_name: str | None = None  # of the adapter that answers; None: the model as it is


class Load(msgspec.Struct, kw_only=True):
    """What a client process has to know of the options."""

    api: str
    url: str
    model: str
    headers: dict[str, str]
    temperature: float
    top_p: float
    ignore_eos: bool
    stream: bool
    wants_cached: bool
    incremental: bool  # a native stream brings new text only
    extra_body: dict[str, Any]
    timeout_s: float
    num_processes: int
    max_concurrency: int | None


class Outcome(msgspec.Struct, kw_only=True):
    """One request, ended well (no `error_kind`) or not. Times are seconds since it was sent."""

    task: int
    turn: int
    start_s: float  # on the machine's monotonic clock
    e2e_s: float = 0.0
    prompt_len: int = 0  # as the dataset has it; of later turns what the server says
    server_prompt_len: int | None = None
    output_len: int | None = None  # None: the server did not say
    # One entry for each event that brought text: when, how many tokens (0: not said) and, where that may be needed, the text.
    times_s: list[float] = []
    tokens: list[int] = []
    texts: list[str] = []
    text: str = ""
    cached_tokens: int | None = None
    verify_steps: int = 0  # of speculative decoding, 0: none
    num_events: int = 0
    error_kind: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error_kind


class ClientReport(msgspec.Struct, kw_only=True):
    """What a client process says of itself at the end."""

    cpu_s: float
    duration_s: float
    num_events: int
    max_lag_s: float
    p99_lag_s: float
