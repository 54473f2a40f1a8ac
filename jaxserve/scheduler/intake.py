"""From a TokenizedGenerateReqInput to a Req, or to the sentence that says why not.

The TokenizerManager has checked what needs no knowledge of the running engine; here stands what does: the context and the KV
cache bound prompt and output, and a request that could never be served is refused at once instead of waiting for ever.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np

from jaxserve.config import ServerArgs
from jaxserve.logit_processors import TokenRules
from jaxserve.messages import PROMPT_TAIL_LEN, TokenizedGenerateReqInput
from jaxserve.namespaces import adapter_namespace
from jaxserve.runner import NO_TOKEN_ID, RunnerSpec
from jaxserve.scheduler.adapters import Adapters
from jaxserve.scheduler.answers import ExpertBuffer, HiddenStateBuffer, LogprobBuffer, PromptLogprobs, VectorBuffer
from jaxserve.scheduler.req import Req
from jaxserve.scheduler.stops import StopMatcher, StopPatternMatcher, StopStringMatcher, StopTextDecoder, TokenPieces
from jaxserve.timeline import RequestTimes
from jaxserve.types import SamplingParams, UserProcessor

# SGLang's place for requests without a priority: behind all that have one.
_LEAST_URGENT = -(1 << 63)

# What a model gives, in words.
_MADE = {"embedding": "embeddings", "scores": "scores", "token_scores": "scores of the tokens"}


class Intake:
    def __init__(
        self,
        args: ServerArgs,
        spec: RunnerSpec,
        adapters: Adapters,
        *,
        decoder: StopTextDecoder | None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._args = args
        self._spec = spec
        self._adapters = adapters
        self._pieces = None if decoder is None else TokenPieces(decoder)
        self._clock = clock
        self._wall_clock = wall_clock
        self._splits_prompts = args.chunked_prefill_size != -1
        self._seeds = np.random.default_rng(args.random_seed)
        self._arrivals = itertools.count()
        self._eos = np.array(spec.eos_token_ids, np.int32)

    def build(self, message: TokenizedGenerateReqInput) -> Req:
        """Raises ValueError with the sentence for the user (status 400)."""
        sampling = message.sampling_params
        self._check_kind(message)
        prompt_ids = np.ascontiguousarray(message.input_ids, np.int32)
        self._check_prompt(prompt_ids, message.input_embeds, sampling.max_new_tokens)
        prompt_tail = _prompt_tail(message, prompt_ids)
        own_stop_ids = np.array(sampling.stop_token_ids, np.int32)
        adapter = None if message.lora_name is None else self._adapters.resolve(message.lora_name)
        req = Req(
            rid=message.rid,
            prompt_ids=prompt_ids,
            sampling=sampling,
            max_new_tokens=self._clamp_max_new(len(prompt_ids), sampling.max_new_tokens),
            seed=self._seed(sampling.sampling_seed),
            arrival=next(self._arrivals),
            stream=message.stream,
            extra_key=adapter_namespace(message.extra_key, message.lora_name, None if adapter is None else adapter.version),
            adapter=adapter,
            route=message.route,
            input_embeds=message.input_embeds,
            prompt_tail=prompt_tail,
            own_stop_ids=own_stop_ids,
            device_stop_ids=own_stop_ids if sampling.ignore_eos else np.concatenate([self._eos, own_stop_ids]),
            stop_text=self._stop_text(message.sampling_params, prompt_tail),
            logprobs=self._logprobs(message),
            thinking=message.thinking,
            rules=self._rules(message),
            processor=self._processor(message),
            times=RequestTimes(queue_entry_s=self._wall_clock()),
            waiting_since_s=self._clock(),
        )
        self._set_priority(req, message.priority)
        self._set_prompt_answers(req, message)
        return req

    def _check_kind(self, message: TokenizedGenerateReqInput) -> None:
        """A vector or text is wanted: whether the model makes that."""
        generates, vectors = self._spec.generates, self._spec.vectors
        if not message.pools:
            if not generates:
                assert vectors is not None, "a model that makes neither text nor vectors"
                raise ValueError(f"The model generates no text: it makes {_MADE[vectors.gives]} of texts.")
            return
        if vectors is None:
            raise ValueError("The model makes no vectors of texts: it generates text.")
        if message.sampling_params.max_new_tokens != 0:
            raise ValueError(
                f"Where a vector is wanted nothing is generated: max_new_tokens must be 0, "
                f"got {message.sampling_params.max_new_tokens}."
            )
        for field in ("return_logprob", "return_hidden_states", "return_routed_experts"):
            if getattr(message, field):
                raise ValueError(f"Where a vector is wanted nothing else is returned: {field} must be false.")

    def _check_prompt(self, prompt_ids: np.ndarray, embeds: np.ndarray | None, max_new_tokens: int | None) -> None:
        spec, length = self._spec, len(prompt_ids)
        if length == 0:
            raise ValueError("The prompt is empty; at least one token is needed.")
        longest = spec.context_len if max_new_tokens == 0 else spec.context_len - 1
        if length > longest:
            raise ValueError(
                f"The prompt has {length} tokens; the context length is {spec.context_len} tokens, prompt and output together."
            )
        if length > spec.max_sequence_tokens:
            raise ValueError(f"The prompt has {length} tokens; the KV cache holds {spec.max_sequence_tokens} in all.")
        if not self._splits_prompts and length > spec.max_step_tokens:
            raise ValueError(
                f"The prompt has {length} tokens; with --chunked-prefill-size -1 it must fit one step of "
                f"{spec.max_step_tokens} tokens."
            )
        if embeds is not None:
            if embeds.shape != (length, spec.hidden_size) or (prompt_ids != NO_TOKEN_ID).any():
                raise ValueError(f"input_embeds must be {length} x {spec.hidden_size} numbers, got shape {embeds.shape}.")
            return
        low, high = int(prompt_ids.min()), int(prompt_ids.max())
        num_ids = spec.num_token_ids or spec.vocab_size
        if low < 0 or high >= num_ids:
            raise ValueError(f"input_ids must lie in [0, {num_ids}), got {low if low < 0 else high}.")

    def _clamp_max_new(self, prompt_len: int, wanted: int | None) -> int:
        # The last token of a sequence is never written to the KV cache, so the cache allows one token more than it holds.
        most = min(self._spec.context_len, self._spec.max_sequence_tokens + 1) - prompt_len
        return most if wanted is None else min(wanted, most)

    def _seed(self, wanted: int | None) -> int:
        return int(self._seeds.integers(1 << 63)) if wanted is None else wanted

    def _stop_text(self, sampling: SamplingParams, prompt_tail: list[int]) -> StopMatcher | None:
        if not sampling.stop and not sampling.stop_regex:
            return None
        if self._pieces is None:
            field = "stop" if sampling.stop else "stop_regex"
            raise ValueError(f"{field} needs a tokenizer, and this server runs without one; use stop_token_ids.")
        if not sampling.stop_regex:
            return StopStringMatcher(self._pieces, sampling.stop)
        return StopPatternMatcher(self._pieces.decoder, prompt_tail, sampling.stop, sampling.stop_regex)

    def _logprobs(self, message: TokenizedGenerateReqInput) -> LogprobBuffer | None:
        if not message.return_logprob:
            return None
        if message.top_logprobs_num > self._spec.max_top_logprobs:
            raise ValueError(
                f"top_logprobs_num may be at most {self._spec.max_top_logprobs} (--max-top-logprobs), "
                f"got {message.top_logprobs_num}."
            )
        token_ids = np.array(message.token_ids_logprob, np.int32) if message.token_ids_logprob else None
        return LogprobBuffer(message.top_logprobs_num, token_ids)

    def _rules(self, message: TokenizedGenerateReqInput) -> TokenRules | None:
        rules = message.logit_rules
        if rules is None or not rules.makes_masks:
            return None
        return TokenRules(rules, len(message.input_ids), None if self._pieces is None else self._pieces.decoder)

    def _processor(self, message: TokenizedGenerateReqInput) -> UserProcessor | None:
        processor = None if message.logit_rules is None else message.logit_rules.user
        if processor is not None and not self._args.enable_custom_logit_processor:
            raise ValueError("custom_logit_processor may hold code only with --enable-custom-logit-processor.")
        return processor

    def _set_prompt_answers(self, req: Req, message: TokenizedGenerateReqInput) -> None:
        if message.pools and self._spec.vectors is not None:
            req.vectors = VectorBuffer(req.prompt_len, self._spec.vectors)
        start = message.logprob_start_len
        if req.logprobs is not None and start >= 0:
            if start > req.prompt_len:
                raise ValueError(f"logprob_start_len may be at most the prompt's {req.prompt_len} tokens, got {start}.")
            req.prompt_logprobs = PromptLogprobs(
                start, req.prompt_len - 1, req.logprobs.top_num, num_ids=len(message.token_ids_logprob or ())
            )
        if message.return_hidden_states:
            if not self._spec.returns_hidden_states:
                raise ValueError("return_hidden_states needs a server that runs with --enable-return-hidden-states.")
            req.hidden_states = HiddenStateBuffer(req.prompt_len, only_last=message.return_hidden_states == "last")
        if message.return_routed_experts:
            if self._spec.experts_shape is None:
                raise ValueError("return_routed_experts needs a server that runs with --enable-return-routed-experts.")
            first = message.routed_experts_start_len
            if first > req.prompt_len:
                raise ValueError(f"routed_experts_start_len may be at most the prompt's {req.prompt_len} tokens, got {first}.")
            req.experts = ExpertBuffer(req.prompt_len, first)

    def _set_priority(self, req: Req, priority: int | None) -> None:
        args = self._args
        if not (args.enable_priority_scheduling or args.schedule_policy == "priority"):
            if priority is not None and args.abort_on_priority_when_disabled:
                raise ValueError(
                    f"priority {priority} was given, but priority scheduling is off (--enable-priority-scheduling)."
                )
            return
        value = args.default_priority_value if priority is None else priority
        if value is None:
            req.urgency = _LEAST_URGENT
        else:
            req.priority = value
            req.urgency = -value if args.schedule_low_priority_values_first else value


def _prompt_tail(message: TokenizedGenerateReqInput, prompt_ids: np.ndarray) -> list[int]:
    """Behind a text of which a vector is made no text goes on; and its ids may say more than the tokenizer knows."""
    if message.pools:
        return []
    return prompt_ids[-PROMPT_TAIL_LEN:].tolist() if message.input_embeds is None else message.prompt_tail
