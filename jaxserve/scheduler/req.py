"""Req: one request's whole life inside the scheduler, and the states it may pass through.

A Req is bookkeeping only. While it holds a request row, its token history and counters live in `rows.RowTable` (NumPy, so that
a decode step costs the same for 1 and for 256 requests); while it waits, the tokens it produced before a retraction are in
`output_ids`. It knows nothing about pages (that is its `lease`), policies or messages.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from jaxserve.cache.manager import Lease
from jaxserve.grammar import Matcher, ThinkingMatcher
from jaxserve.logit_processors import TokenRules
from jaxserve.messages import Route
from jaxserve.scheduler.adapter import Adapter
from jaxserve.scheduler.answers import ExpertBuffer, HiddenStateBuffer, LogprobBuffer, PromptLogprobs, VectorBuffer
from jaxserve.scheduler.stops import StopMatcher
from jaxserve.timeline import RequestTimes
from jaxserve.types import FinishReason, SamplingParams, Thinking, UserProcessor

NO_TOKENS = np.zeros(0, np.int32)
NO_TOKENS.flags.writeable = False
NO_LOGPROBS = np.zeros(0, np.float32)
NO_LOGPROBS.flags.writeable = False

# Where a request stands among those that wait for the same thing: the least goes first.
Place = tuple[int, int]


class RequestState(enum.Enum):
    COMPILING = "compiling"  # in the grammar queue: no row, no pages
    WAITING = "waiting"  # in the waiting queue: no row, no pages
    PREFILL = "prefill"  # holds a row; part of its prompt is still to be launched
    DECODE = "decode"  # its whole prompt was launched
    FINISHED = "finished"  # its terminal message is out; a row it still holds goes when no launched step names it


_LEGAL_NEXT = {
    RequestState.COMPILING: {RequestState.WAITING, RequestState.FINISHED},
    RequestState.WAITING: {RequestState.COMPILING, RequestState.PREFILL, RequestState.FINISHED},
    RequestState.PREFILL: {RequestState.DECODE, RequestState.WAITING, RequestState.FINISHED},
    RequestState.DECODE: {RequestState.WAITING, RequestState.FINISHED},
    RequestState.FINISHED: set(),
}


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Req:
    rid: str
    prompt_ids: np.ndarray  # int32 [prompt_len]
    sampling: SamplingParams
    max_new_tokens: int  # clamped to what the context and the KV cache can hold
    seed: int
    arrival: int = 0  # counts the requests of this scheduler
    stream: bool = False
    extra_key: str | None = None  # its namespace of the cache; with an adapter, one of that one's version
    adapter: Adapter | None = None  # the LoRA adapter that it runs with
    route: Route = dataclasses.field(default_factory=Route)  # of its outputs
    input_embeds: np.ndarray | None = None  # float32 [prompt_len, E]: what stands for the prompt's ids, which are NO_TOKEN_ID
    prompt_tail: list[int] = dataclasses.field(default_factory=list)  # ids whose text the outputs' text goes on from
    priority: int = 0  # as the user gave it (or its default); for the cache's priority eviction
    urgency: int = 0  # larger goes first; 0 for all unless priority scheduling is on
    own_stop_ids: np.ndarray = dataclasses.field(default_factory=lambda: NO_TOKENS)  # int32: sampling.stop_token_ids
    device_stop_ids: np.ndarray = dataclasses.field(
        default_factory=lambda: NO_TOKENS
    )  # int32: own_stop_ids and, unless ignored, eos
    stop_text: StopMatcher | None = None  # set if there are stop strings or patterns
    logprobs: LogprobBuffer | None = None  # of outputs, set if logprobs are returned
    prompt_logprobs: PromptLogprobs | None = None  # set if those of prompt tokens are returned
    hidden_states: HiddenStateBuffer | None = None  # set if they are returned
    experts: ExpertBuffer | None = None  # set if they are returned
    vectors: VectorBuffer | None = None  # set if it pools
    thinking: Thinking | None = None  # what comes before its grammar
    matcher: Matcher | ThinkingMatcher | None = None  # set once its grammar is compiled; keeps its place over a retraction
    rules: TokenRules | None = None  # of its named logit processors
    processor: UserProcessor | None = None  # its own code

    state: RequestState = RequestState.WAITING
    lease: Lease | None = None  # from admission to release
    output_ids: np.ndarray = dataclasses.field(default_factory=lambda: NO_TOKENS)  # int32: outputs so far; valid while WAITING
    output_logprobs: np.ndarray = dataclasses.field(default_factory=lambda: NO_LOGPROBS)  # float32, theirs if `logprobs` is set
    sent_len: int = 0  # output tokens already sent; valid while WAITING
    announced: bool = False  # its first message, with what the detokenizer needs to know, is out
    cached_len: int = 0  # prompt tokens that came from the tree at the first admission
    finish_reason: FinishReason | None = None
    has_begun: bool = False  # was admitted before
    verify_steps: int = 0  # steps that verified drafts, valid while WAITING; and the drafts accepted in them
    accepted_drafts: int = 0

    times: RequestTimes = dataclasses.field(default_factory=RequestTimes)  # what is told of it, complete with its end
    waiting_since_s: float = 0.0  # the scheduler's own clock, for time-outs
    running_since_s: float = 0.0  # of the first admission

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence this request may become."""
        return len(self.prompt_ids) + self.max_new_tokens

    @property
    def fill_len(self) -> int:
        """Tokens to have in the KV cache before the next one can be sampled; valid while WAITING."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def fill_ids(self) -> np.ndarray:
        """The prompt and, after a retraction, the outputs so far; valid while WAITING."""
        return self.prompt_ids if not len(self.output_ids) else np.concatenate([self.prompt_ids, self.output_ids])

    @property
    def token_ids_logprob(self) -> np.ndarray | None:
        """int32: tokens whose logprobs are returned at every place."""
        return None if self.logprobs is None else self.logprobs.token_ids

    @property
    def returns_states(self) -> bool:
        """More about each token is returned than one that is sampled again could take back."""
        return self.hidden_states is not None or self.experts is not None

    @property
    def recompute_from(self) -> int | None:
        """The first position that must be computed although its KV may be cached, since something is asked about it."""
        if self.vectors is not None:
            return self.vectors.first
        asked = (self.prompt_logprobs, self.hidden_states, self.experts)
        return min((about.next for about in asked if about is not None and about.next < about.end), default=None)

    @property
    def row(self) -> int:
        assert self.lease is not None, f"request {self.rid} is {self.state.value} and holds no row"
        return self.lease.row

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def move_to(self, state: RequestState) -> None:
        assert state in _LEGAL_NEXT[self.state], f"request {self.rid}: {self.state.value} -> {state.value} is not legal"
        self.state = state

    def finish(self, reason: FinishReason) -> None:
        self.move_to(RequestState.FINISHED)
        self.finish_reason = reason


def unexpected(what: str) -> FinishReason:
    """The end of one request because of an error that nobody thought of, which is in the log."""
    text = f"The scheduler failed to {what}; the server's log says more."
    return FinishReason.abort(text, 500, "InternalServerError")
