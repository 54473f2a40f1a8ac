"""What makes a request valid, before it is given to the scheduler: counts, ranges and lengths.

Pure functions over GenerateReqInput and token ids; every failure is a RequestError naming field, value and limit.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from jaxserve.config import ServerArgs
from jaxserve.parsers.base import ReasoningFormat
from jaxserve.runner import Vectors
from jaxserve.server.prompt_encoding import TooManyTokensError, chars_at_once
from jaxserve.server.reply_limits import NO_REPLY_LIMITS, ReplyLimits
from jaxserve.server.requests import GenerateReqInput, PromptEmbeds, PromptOptions, RequestError
from jaxserve.server.tokenizer import Tokenizer
from jaxserve.text.scanner import moves_of
from jaxserve.types import GRAMMAR_KINDS, UNLIMITED_TOP_K, SamplingParams

logger = logging.getLogger(__name__)

MOST_SAMPLES = 4096
# Sequences of one request, prompts times n: each takes memory before the scheduler can refuse it.
_MOST_SEQUENCES = 1 << 18
_MAX_RID_CHARS = 512  # it is repeated in every event and log line
_MAX_LORA_PATH_CHARS = 4096  # as long as a path, which may be an adapter's name; each prompt's message has it
_MOST_PATTERN_SETS = 32
_MOST_PARAMS_CHARS = 64 * 1024 * 1024
_SEED_RANGE = 1 << 64
_DETERMINISTIC_SEED = 42  # as SGLang has it
_MOST_TOKEN_IDS_LOGPROB = 1024  # at every place
_LARGEST_INT32 = 2**31 - 1

T = TypeVar("T")
PatternSet = tuple[tuple[str, ...], tuple[str, ...]]  # stop_regex and stop


@dataclasses.dataclass(frozen=True)
class ModelLimits:
    """What the scheduler reported when it became ready, and what the options allow."""

    context_len: int
    vocab_size: int
    hidden_size: int
    max_total_tokens: int  # tokens the KV cache holds
    max_top_logprobs: int
    allow_auto_truncate: bool
    follows_grammars: bool = True
    makes_text: bool = True  # there is a tokenizer
    max_running: int = 0  # sequences at once
    max_queued: int | None = None  # that wait; None: no limit
    num_shards: int = 1  # of the KV cache; a request is in one of them
    reply: ReplyLimits = NO_REPLY_LIMITS
    reasoning: ReasoningFormat | None = None  # how the model thinks, if the server knows it
    runs_user_code: bool = False
    serves_lora: bool = False
    generates: bool = True
    vectors: Vectors | None = None  # what the model makes of texts, if it does
    num_token_ids: int = 0  # ids that tokens may have, their types included; 0: those of the vocabulary
    new_tokens: int = 1  # that a prompt must leave room for
    default_seed: int | None = None  # of requests that bring none; None: the scheduler draws one

    @staticmethod
    def of(info: dict[str, Any], args: ServerArgs, reply: ReplyLimits, reasoning: ReasoningFormat | None) -> ModelLimits:
        return ModelLimits(
            context_len=info["context_len"],
            vocab_size=info["vocab_size"],
            hidden_size=info["hidden_size"],
            max_total_tokens=info["max_total_tokens"],
            max_top_logprobs=info.get("max_top_logprobs", args.max_top_logprobs),
            allow_auto_truncate=args.allow_auto_truncate,
            follows_grammars=args.follows_grammars,
            makes_text=not args.skip_tokenizer_init,
            max_running=info["max_rows"],
            max_queued=args.max_queued_requests,
            num_shards=info["num_shards"],
            reply=reply,
            reasoning=reasoning,
            runs_user_code=args.enable_custom_logit_processor,
            serves_lora=args.serves_lora,
            generates=info.get("generates", True),
            vectors=_vectors(info.get("vectors")),
            num_token_ids=info.get("num_token_ids", 0),
            default_seed=_DETERMINISTIC_SEED if args.enable_deterministic_inference else None,
        )

    @functools.cached_property
    def of_pooling(self) -> ModelLimits:
        """Those of a request for vectors: no token follows its prompts."""
        return dataclasses.replace(self, new_tokens=0)

    @property
    def num_prompt_ids(self) -> int:
        """Ids that a prompt's tokens may have."""
        return self.vocab_size if self.new_tokens else max(self.vocab_size, self.num_token_ids)

    @property
    def type_stride(self) -> int:
        """What is added to the id of a token for each type before its own; 0: the model knows no types."""
        return self.vocab_size if self.num_token_ids > self.vocab_size else 0

    def check_generates(self) -> None:
        if not self.generates:
            what_for = _WHAT_FOR[self.vectors.gives if self.vectors is not None else "embedding"]
            message = f"This server's model does not generate text: it {what_for}."
            raise RequestError(message, param="model", code="unsupported_operation")

    def check_vectors(self, gives: Collection[str]) -> Vectors:
        """What the model makes of texts, if that is one of what it is asked to give."""
        if self.vectors is None:
            message = "This server makes no vectors of texts: its model generates."
        elif self.vectors.gives not in gives:
            wanted = "embeddings" if "embedding" in gives else "scores"
            message = f"This server's model gives no {wanted}: it {_WHAT_FOR[self.vectors.gives]}."
        else:
            return self.vectors
        raise RequestError(message, param="model", code="unsupported_operation")

    def check_num_sequences(self, num_prompts: int, n: int) -> None:
        """Of one request. Cheap: meant for before anything is done for each of them."""
        wanted = f"The request asks for {num_prompts * n} sequences ({num_prompts} prompts, n={n})"
        if self.max_queued is not None and num_prompts * n > self.max_running + self.max_queued:
            message = (
                f"{wanted}; this server runs {self.max_running} at once and lets {self.max_queued} wait "
                "(--max-queued-requests). Send it in parts."
            )
            raise RequestError(message, param="n" if n > num_prompts else None)
        if num_prompts * n > _MOST_SEQUENCES:
            raise RequestError(f"{wanted}; at most {_MOST_SEQUENCES} are possible.", param="n")

    @property
    def longest_prompt_len(self) -> int:
        """A prompt must leave room for one token, in the context and in the KV cache, unless vectors are wanted."""
        return min(self.context_len, self.max_sequence_tokens) - self.new_tokens

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens that the KV cache has room for of one request."""
        return self.max_total_tokens // self.num_shards


def _vectors(info: Vectors | dict[str, Any] | None) -> Vectors | None:
    """As a scheduler's message brings it."""
    return Vectors(**{**info, "labels": tuple(info["labels"])}) if isinstance(info, dict) else info


_WHAT_FOR = {
    "embedding": "makes embeddings of texts (POST /v1/embeddings)",
    "scores": "scores texts (POST /classify, /rerank)",
    "token_scores": "scores each token of a text (POST /classify)",
}


def check_shape(req: GenerateReqInput, limits: ModelLimits) -> None:
    """Everything that can be checked before tokenizing."""
    if req.pools:
        _check_pools(req, limits)
    else:
        limits.check_generates()
        if req.pairs is not None:
            raise RequestError("Pairs of texts are for vectors: text must be one text for each prompt.", param="text")
    given = {"text": req.prompts, "pairs": req.pairs, "input_ids": req.input_ids, "input_embeds": req.input_embeds}
    fields = [field for field, prompts in given.items() if prompts is not None]
    if len(fields) != 1:
        raise RequestError("Exactly one of text, input_ids and input_embeds must be given.", param="text")
    if req.num_prompts == 0:
        raise RequestError("The request holds no prompt.", param=fields[0])
    if req.sampling_params and req.num_samples > MOST_SAMPLES:
        raise RequestError(f"n must be at most {MOST_SAMPLES}, got {req.num_samples}.", param="n")
    limits.check_num_sequences(req.num_prompts, req.num_samples if req.sampling_params else 1)
    if len(req.sampling_params) != req.num_prompts:
        raise RequestError(
            f"sampling_params must have one entry per prompt: got {len(req.sampling_params)} for {req.num_prompts} prompts.",
            param="sampling_params",
        )
    assert len(req.options) == req.num_prompts, f"{len(req.options)} options of {req.num_prompts} prompts"
    distinct_params = _distinct(req.sampling_params)
    for params in distinct_params:
        try:
            params.verify(limits.vocab_size)
        except ValueError as error:
            raise RequestError(str(error), param=str(error).split(" ", 1)[0]) from error
        if not limits.makes_text:
            _check_needs_no_text(params)
        if params.grammar is not None and not limits.follows_grammars:
            kind = params.grammar.kind
            raise RequestError(f"{kind} is not available: this server runs with --grammar-backend none.", param=kind)
    counts = {params.n for params in distinct_params}
    if len(counts) > 1:
        raise RequestError(f"All prompts of a request must share one n; got {sorted(counts)}.", param="n")
    distinct_options = _distinct(req.options)
    for options in distinct_options:
        _check_options(options, limits)
        if options.session_params is not None and req.num_samples > 1:
            raise RequestError(f"A turn of a session has one sequence, got n={req.num_samples}.", param="n")
    for embeds, options in zip(req.input_embeds or (), req.options, strict=False):
        _check_asks_no_ids(embeds, options)
    if req.rids is not None:
        _check_rids(req.rids, req.num_prompts)
    _check_unicode(req, distinct_params, distinct_options)
    _check_params_size(req.sampling_params, distinct_params)


def _check_pools(req: GenerateReqInput, limits: ModelLimits) -> None:
    """What follows from asking for vectors alone. The routes see to most of it; the texts are their clients'."""
    limits.check_vectors(("embedding", "scores", "token_scores"))
    if req.stream or any(params.n > 1 or params.max_new_tokens != 0 for params in _distinct(req.sampling_params)):
        raise RequestError("A request for vectors has no new tokens (max_new_tokens 0, n 1) and no stream.", param="stream")
    if any(o.shows_more or o.session_params is not None for o in _distinct(req.options)):
        raise RequestError("A request for vectors has no logprobs, hidden states, experts or session.", param="return_logprob")
    if "" in (req.prompts or ()):
        raise RequestError("text must not hold an empty string.", param="text")
    wanted, longest = req.truncate_prompt_tokens, limits.of_pooling.longest_prompt_len
    if wanted is not None and wanted != -1 and not 1 <= wanted <= longest:
        message = f"truncate_prompt_tokens must be -1 or in [1, {longest}], got {wanted}."
        raise RequestError(message, param="truncate_prompt_tokens")


def _check_asks_no_ids(embeds: PromptEmbeds, options: PromptOptions) -> None:
    """What only a prompt of tokens has."""
    start = options.logprob_start_len
    if options.return_logprob and start not in (-1, embeds.length):
        message = f"logprob_start_len must be -1 or the prompt's end, {embeds.length}, with input_embeds, got {start}."
        raise RequestError(message, param="logprob_start_len")
    if options.session_params is not None:
        raise RequestError("A turn of a session needs a prompt of tokens, not input_embeds.", param="session_params")


def _check_needs_no_text(params: SamplingParams) -> None:
    for name in ("stop", "stop_regex", *GRAMMAR_KINDS):
        if getattr(params, name):
            raise without_tokenizer(name, param=name)


def without_tokenizer(what: str, param: str | None = None) -> RequestError:
    message = f"{what} needs a tokenizer, and this server runs without one (--skip-tokenizer-init): send input_ids."
    return RequestError(message, param=param)


def _check_options(options: PromptOptions, limits: ModelLimits) -> None:
    if not 0 <= options.top_logprobs_num <= limits.max_top_logprobs:
        raise RequestError(
            f"top_logprobs_num must be in [0, {limits.max_top_logprobs}], got {options.top_logprobs_num}.",
            param="top_logprobs_num",
        )
    if options.logprob_start_len < -1:
        message = f"logprob_start_len must be -1 (none) or a place in the prompt, got {options.logprob_start_len}."
        raise RequestError(message, param="logprob_start_len")
    if (start := options.routed_experts_start_len) < 0:
        message = f"routed_experts_start_len must be a place in the prompt, got {start}."
        raise RequestError(message, param="routed_experts_start_len")
    token_ids = options.token_ids_logprob or ()
    if len(token_ids) > _MOST_TOKEN_IDS_LOGPROB:
        message = f"token_ids_logprob may hold at most {_MOST_TOKEN_IDS_LOGPROB} tokens, got {len(token_ids)}."
        raise RequestError(message, param="token_ids_logprob")
    wrong = next((token for token in token_ids if not 0 <= token < limits.vocab_size), None)
    if wrong is not None:
        message = f"token_ids_logprob holds an out-of-vocabulary token id: {wrong} is not in [0, {limits.vocab_size})."
        raise RequestError(message, param="token_ids_logprob")
    if options.priority is not None and abs(options.priority) > _LARGEST_INT32:
        raise RequestError(f"priority must lie within +-{_LARGEST_INT32}, got {options.priority}.", param="priority")
    _check_lora_path(options.lora_path, limits)


def _check_lora_path(name: str | None, limits: ModelLimits) -> None:
    """Whether there is an adapter of that name, the scheduler knows."""
    if name and not limits.serves_lora:
        raise RequestError("lora_path is not available: this server runs without --enable-lora.", param="lora_path")
    if name and len(name) > _MAX_LORA_PATH_CHARS:
        message = f"lora_path may have at most {_MAX_LORA_PATH_CHARS} characters, got {len(name)}."
        raise RequestError(message, param="lora_path")


def _distinct(of_prompts: list[T]) -> Collection[T]:
    """Each object once: the prompts of a batch mostly share theirs."""
    return {id(one): one for one in of_prompts}.values()


def _check_params_size(all_params: list[SamplingParams], distinct_params: Collection[SamplingParams]) -> None:
    """They go to the scheduler once for each prompt."""
    times = Counter(map(id, all_params))
    size = sum(_text_size(params) * times[id(params)] for params in distinct_params)
    if size > _MOST_PARAMS_CHARS:
        raise RequestError(
            f"sampling_params hold {size} characters of stop strings, patterns and grammars, counted once for each prompt; at "
            f"most {_MOST_PARAMS_CHARS} are permitted. Send the batch in parts.",
            param="sampling_params",
        )


def _text_size(params: SamplingParams) -> int:
    grammar = params.grammar
    return sum(map(len, params.stop)) + sum(map(len, params.stop_regex)) + (len(grammar.text) if grammar else 0)


def pattern_sets(req: GenerateReqInput) -> list[PatternSet]:
    """What `check_patterns` is to be asked for, each once. Every process that works on the request compiles them."""
    sets = {(tuple(params.stop_regex), tuple(params.stop)) for params in _distinct(req.sampling_params) if params.stop_regex}
    if len(sets) > _MOST_PATTERN_SETS:
        raise RequestError(
            f"A request may have at most {_MOST_PATTERN_SETS} different sets of stop_regex and stop, got {len(sets)}.",
            param="stop_regex",
        )
    return sorted(sets)


def check_patterns(sets: list[PatternSet]) -> None:
    """Some milliseconds for each at worst."""
    for patterns, strings in sets:
        try:
            moves_of(patterns, strings)
        except ValueError as error:
            raise RequestError(str(error), param="stop_regex") from error


def _check_unicode(
    req: GenerateReqInput, distinct_params: Collection[SamplingParams], distinct_options: Collection[PromptOptions]
) -> None:
    """JSON can hold half a surrogate pair; neither a tokenizer nor a message can."""
    texts: dict[str, list[str]] = {
        "text": [*(req.prompts or ()), *(text for pair in req.pairs or () for text in pair)],
        "rid": req.rids or [],
        "extra_key": [options.extra_key or "" for options in distinct_options],
        "cache_salt": [options.cache_salt or "" for options in distinct_options],
        "lora_path": [options.lora_path or "" for options in distinct_options],
        "stop": [stop for params in distinct_params for stop in params.stop],
        "stop_regex": [stop for params in distinct_params for stop in params.stop_regex],
        **{kind: [getattr(params, kind) or "" for params in distinct_params] for kind in GRAMMAR_KINDS},
    }
    for field, strings in texts.items():
        for string in strings:
            if string.isascii():
                continue
            try:
                string.encode()
            except UnicodeEncodeError as error:
                half = f"U+{ord(string[error.start]):04X}"
                raise RequestError(f"{field} holds a lone surrogate, {half} at {error.start}.", param=field) from None


def _check_rids(rids: list[str], num_prompts: int) -> None:
    if len(rids) != num_prompts:
        raise RequestError(f"rid must have one entry per prompt: got {len(rids)} for {num_prompts} prompts.", param="rid")
    if not all(rids):
        raise RequestError("rid must not be an empty string.", param="rid")
    longest = max(map(len, rids), default=0)
    if longest > _MAX_RID_CHARS:
        raise RequestError(f"rid may have at most {_MAX_RID_CHARS} characters, got {longest}.", param="rid")


def encode_prompt(tokenizer: Tokenizer, text: str, limits: ModelLimits, *, add_special_tokens: bool = True) -> list[int]:
    """The ids of a text, not whether they fit: only a text that is far too long is refused here (or shortened, if allowed)."""
    try:
        return tokenizer.encode_prompt(
            text, limits.longest_prompt_len, cut=limits.allow_auto_truncate, add_special_tokens=add_special_tokens
        )
    except TooManyTokensError as error:
        raise too_long(error.at_least, limits, at_least=True) from None


def encode_prompts(tokenizer: Tokenizer, texts: list[str], limits: ModelLimits) -> list[list[int]]:
    """The same for several texts, together if none of them needs to be looked at on its own."""
    if max(map(len, texts)) <= chars_at_once(limits.longest_prompt_len, tokenizer.longest_token_chars):
        return tokenizer.encode_batch(texts)
    return [encode_prompt(tokenizer, text, limits) for text in texts]


def fit_prompt(length: int, limits: ModelLimits) -> int:
    """How many of a prompt's tokens are taken: all, or, if they are too many and that is allowed, as many as fit."""
    longest = limits.longest_prompt_len
    if length <= longest:
        return length
    if not limits.allow_auto_truncate:
        raise too_long(length, limits)
    logger.warning("A prompt of %d tokens was shortened to %d.", length, longest)
    return longest


def check_prompt(ids: list[int], limits: ModelLimits) -> np.ndarray:
    """The prompt as int32, shortened if that is needed and allowed."""
    if not ids:
        raise RequestError("The prompt is empty: it must hold at least one token.", param="text")
    if (length := fit_prompt(len(ids), limits)) < len(ids):  # before anything is done for each of them
        ids = ids[:length]
    # int64 holds whatever msgspec accepted short of absurd; those are out of the vocabulary too.
    try:
        array = np.asarray(ids, dtype=np.int64)
    except OverflowError:
        raise _outside_vocabulary(max(ids, key=abs), limits) from None
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest >= limits.num_prompt_ids:
        raise _outside_vocabulary(lowest if lowest < 0 else highest, limits)
    return array.astype(np.int32)


def _outside_vocabulary(token_id: int, limits: ModelLimits) -> RequestError:
    return RequestError(f"input_ids must lie in [0, {limits.num_prompt_ids}), got {token_id}.", param="input_ids")


# By these words clients find out that a conversation must be shortened: SGLang's tests and LiteLLM by "is longer than the
# model's context length", LiteLLM also by "maximum input length is" and "this model's maximum context length is".


def too_long(prompt_len: int, limits: ModelLimits, *, at_least: bool = False) -> RequestError:
    less = " less one new token" if limits.new_tokens else ""
    if prompt_len > limits.context_len - limits.new_tokens:
        limit = f"the model's context length ({limits.context_len} tokens){less}."
    else:
        shards = f" in each of {limits.num_shards} shards" if limits.num_shards > 1 else ""
        limit = (
            f"this server's KV cache ({limits.max_sequence_tokens} tokens{shards}){less}: "
            f"the maximum input length is {limits.longest_prompt_len} tokens."
        )
    count = f"{'at least ' if at_least else ''}{prompt_len} tokens"
    return RequestError(f"The input ({count}) is longer than {limit}", code="context_length_exceeded")


def fit_new_tokens(params: SamplingParams, prompt_len: int, limits: ModelLimits, *, cut: bool = False) -> int:
    """max_new_tokens for this prompt: what was asked for, or what the context has room for. `cut`: too many are no error."""
    room = limits.context_len - prompt_len
    if params.max_new_tokens is None:
        return room
    if params.max_new_tokens > room:
        if not (cut or limits.allow_auto_truncate):
            total = prompt_len + params.max_new_tokens
            raise RequestError(
                f"Requested token count exceeds the model's maximum context length of {limits.context_len} tokens: "
                f"the input has {prompt_len} tokens and max_new_tokens is {params.max_new_tokens}, together {total}; "
                f"this model's maximum context length is {limits.context_len} tokens.",
                param="max_new_tokens",
                code="context_length_exceeded",
            )
        return room
    return params.max_new_tokens


def sample_params(
    params: SamplingParams,
    sample: int,
    max_new_tokens: int,
    biases: Mapping[int, float] | None = None,
    default_seed: int | None = None,
) -> SamplingParams:
    """The parameters of one of n samples. Sample j of a seeded request has the seed plus j. `biases` come on top of its own;
    what is left of custom_params goes another way."""
    seed = default_seed if params.sampling_seed is None else params.sampling_seed
    if seed is not None:
        seed = (seed + sample + _SEED_RANGE // 2) % _SEED_RANGE - _SEED_RANGE // 2
    return msgspec.structs.replace(
        params,
        n=1,
        sampling_seed=seed,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min(params.min_new_tokens, max_new_tokens),
        # Numbers without an upper limit, cut to what fits a message and a device array; larger ones mean the same.
        top_k=min(params.top_k, UNLIMITED_TOP_K),
        stream_interval=params.stream_interval and min(params.stream_interval, _LARGEST_INT32),
        logit_bias={**params.logit_bias, **biases} if biases else params.logit_bias,
        custom_params=None,
    )
