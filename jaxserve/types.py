"""The vocabulary every process shares: what a request asks for and how it can end.

Plain data only: nothing here knows about JAX, sockets, HTTP or a tokenizer. Everything is a msgspec struct because all of it
crosses a process border inside the messages of `jaxserve.messages`.
"""

from __future__ import annotations

import enum
import math
from typing import Any, Literal, NamedTuple

import msgspec

# Limits a user can run into. SGLang has the first one; the others bound device tables.
MAX_STOP_STRINGS = 32
MAX_STOP_REGEX_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 512
LARGEST_LOGIT_BIAS = 1e4  # OpenAI's is 100; more than any logit, and far from where sums of float32 overflow
MAX_GRAMMAR_BYTES = 256 * 1024
UNLIMITED_TOP_K = 1 << 30

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf", "structural_tag")

# Below this a temperature means "greedy" (SGLang's rule).
GREEDY_TEMPERATURE = 1e-6
# Beyond these, logits of float32 leave its range; long before, every token is as likely as any other, or one is certain.
LARGEST_TEMPERATURE = 1e6
LEAST_REPETITION_PENALTY = 1e-6


class ForwardMode(enum.IntEnum):
    """What a step does with its rows. Later modes (TARGET_VERIFY, DRAFT) append here."""

    EXTEND = 0  # every row brings the next part of its prompt
    DECODE = 1  # every row brings the one token it sampled last
    MIXED = 2  # decode rows first, then extend rows
    IDLE = 3  # nothing to run


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a request ended. `type` is SGLang's `finish_reason.type`."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None  # stop: the token id or the stop string that matched
    length: int | None = None  # length: the number of output tokens
    message: str | None = None  # abort: one sentence for the user
    status_code: int | None = None  # abort: the HTTP status to answer with
    err_type: str | None = None  # abort: BadRequestError, ServiceUnavailableError, ...

    @staticmethod
    def stop(matched: int | str | None) -> FinishReason:
        return FinishReason(type="stop", matched=matched)

    @staticmethod
    def length_limit(length: int) -> FinishReason:
        return FinishReason(type="length", length=length)

    @staticmethod
    def abort(message: str, status_code: int | None = None, err_type: str | None = None) -> FinishReason:
        return FinishReason(type="abort", message=message, status_code=status_code, err_type=err_type)

    def to_dict(self) -> dict[str, object]:
        """The object that goes into `meta_info.finish_reason`."""
        if self.type == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.type == "length":
            return {"type": "length", "length": self.length}
        return {
            "type": "abort",
            "message": self.message,
            "status_code": self.status_code,
            "err_type": self.err_type,
        }


class Grammar(NamedTuple):
    """What a constrained output must match. The kind is the name of the sampling parameter that holds the text."""

    kind: GrammarKind
    text: str


class Thinking(msgspec.Struct, frozen=True):
    """How a message thinks before it answers. Thinking is free text; a request's grammar begins behind it."""

    begin: str | None  # the tag before thinking, which the output may begin with; None: the output begins inside thinking
    end: str  # the tag after it, as text


class ThinkingTag(NamedTuple):
    """What a model writes where its thinking begins or ends."""

    text: str
    token_id: int | None  # where one token is just the tag


class ThinkingBudget(msgspec.Struct, frozen=True):
    """When thinking has to end."""

    num_tokens: int  # of thinking; then it is closed
    begin: ThinkingTag | None  # before thinking; None: the output begins inside thinking
    ends: list[ThinkingTag]  # behind each of them the output does not think any more
    closing: list[int]  # tokens that end it
    closing_behind_newline: list[int]  # the same behind a line's end
    spent: int = 0  # tokens of thinking in the prompt


class NoRepeatNgram(msgspec.Struct, frozen=True):
    """No n-gram comes twice within a window of the sequence's last tokens."""

    ngram_size: int
    window_size: int
    whitelist_token_ids: list[int] = []  # may always come


class UserProcessor(msgspec.Struct, frozen=True):
    """Code of the user's own, never run outside the process that is there for it."""

    code: bytes  # a pickle
    params: bytes  # custom_params, as JSON


class LogitRules(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request's logit processors do, beside what its sampling parameters say. Not all are None."""

    budget: ThinkingBudget | None = None
    ngram: NoRepeatNgram | None = None
    user: UserProcessor | None = None

    @property
    def makes_masks(self) -> bool:
        return self.budget is not None or self.ngram is not None


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to turn logits into tokens and when to stop. Names, defaults and ranges are SGLang's.

    `verify` is called once, in the TokenizerManager, before the request crosses to the scheduler; everything behind it may
    rely on the ranges.
    """

    max_new_tokens: int | None = 128  # None: up to the context length
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    stop_regex: list[str] = []
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: dict[int, float] = {}
    sampling_seed: int | None = None
    json_schema: str | None = None  # at most one of these four is set
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    custom_params: dict[str, Any] | None = None  # of the request's custom_logit_processor

    @property
    def grammar(self) -> Grammar | None:
        """What the output must match, if anything."""
        for kind in GRAMMAR_KINDS:
            text = getattr(self, kind)
            if text is not None:
                return Grammar(kind, text)
        return None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    def verify(self, vocab_size: int) -> None:
        """Raises ValueError with a sentence naming the field, its value and the limit."""

        def check(ok: bool, field: str, rule: str) -> None:
            if not ok:
                raise ValueError(f"{field} must be {rule}, got {getattr(self, field)!r}.")

        check(self.max_new_tokens is None or self.max_new_tokens >= 0, "max_new_tokens", "at least 0")
        check(self.max_new_tokens is None or self.max_new_tokens < 2**63, "max_new_tokens", "a 64-bit integer")
        most_new = math.inf if self.max_new_tokens is None else self.max_new_tokens
        check(0 <= self.min_new_tokens <= most_new, "min_new_tokens", f"in [0, max_new_tokens={self.max_new_tokens}]")
        check(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "non-negative and finite")
        check(self.temperature <= LARGEST_TEMPERATURE, "temperature", f"at most {LARGEST_TEMPERATURE:g}")
        check(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        check(self.top_k == -1 or self.top_k >= 1, "top_k", "-1 (disable) or at least 1")
        check(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]")
        check(0 < self.repetition_penalty <= 2, "repetition_penalty", "in (0, 2]")
        least = LEAST_REPETITION_PENALTY
        check(self.repetition_penalty >= least, "repetition_penalty", f"at least {least:g}")
        check(self.n >= 1, "n", "at least 1")
        check(self.stream_interval is None or self.stream_interval >= 1, "stream_interval", "at least 1")
        check(self.sampling_seed is None or -(2**63) <= self.sampling_seed < 2**63, "sampling_seed", "a 64-bit integer")
        self._verify_stops(vocab_size)
        self._verify_logit_bias(vocab_size)
        self._verify_grammar()

    def _verify_stops(self, vocab_size: int) -> None:
        for field, limit in (
            ("stop", MAX_STOP_STRINGS),
            ("stop_regex", MAX_STOP_STRINGS),
            ("stop_token_ids", MAX_STOP_TOKEN_IDS),
        ):
            count = len(getattr(self, field))
            if count > limit:
                raise ValueError(f"{field} may hold at most {limit} entries, got {count}.")
        if any(not stop for stop in self.stop):
            raise ValueError("stop must not contain an empty string.")
        for pattern in self.stop_regex:
            if len(pattern.encode(errors="surrogatepass")) > MAX_STOP_REGEX_BYTES:
                raise ValueError(
                    f"stop_regex patterns may have at most {MAX_STOP_REGEX_BYTES} bytes, got {pattern[:40]!r}... with "
                    f"{len(pattern.encode(errors='surrogatepass'))}."
                )
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"stop_token_ids must lie in [0, {vocab_size}), got {token_id}.")

    def _verify_logit_bias(self, vocab_size: int) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias may hold at most {MAX_LOGIT_BIAS} tokens, got {len(self.logit_bias)}.")
        for token_id, bias in self.logit_bias.items():
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"logit_bias keys must be token ids in [0, {vocab_size}), got {token_id}.")
            if not (abs(bias) <= LARGEST_LOGIT_BIAS or bias == -math.inf):  # the latter forbids a token
                most = f"{LARGEST_LOGIT_BIAS:g}"
                raise ValueError(f"logit_bias of token {token_id} must be a number in [-{most}, {most}], got {bias}.")

    def _verify_grammar(self) -> None:
        given = [kind for kind in GRAMMAR_KINDS if getattr(self, kind) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} cannot be combined: a request may have one grammar.")
        if self.grammar is not None:
            kind, text = self.grammar
            # A lone surrogate is refused elsewhere, with a better sentence than the encoder's.
            size = len(text.encode(errors="surrogatepass"))
            if not text.strip():
                raise ValueError(f"{kind} must not be empty.")
            if size > MAX_GRAMMAR_BYTES:
                raise ValueError(f"{kind} may have at most {MAX_GRAMMAR_BYTES} bytes, got {size}.")
