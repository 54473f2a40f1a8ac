"""POST /v1/completions: raw prompts in, text out.

    body -> CompletionRequest -> GenerateReqInput -> chunks -> one reply, or one event per chunk

A batch of p prompts with n samples each answers with p*n choices, in the order of the prompts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from jaxserve.server.http.block_response import BlockResponse
from jaxserve.server.http.body import read_struct
from jaxserve.server.http.connection import unless_disconnected
from jaxserve.server.http.docs import json_body
from jaxserve.server.http.event_stream import EventStream
from jaxserve.server.http.paced_stream import PacedStream
from jaxserve.server.native.sizes import encode_all
from jaxserve.server.openai.best_of import best_sequences
from jaxserve.server.openai.collect import Ending, Sequence, Usage, gather, shaped
from jaxserve.server.openai.constraints import requested_grammar
from jaxserve.server.openai.context import OpenAIContext, context_of
from jaxserve.server.openai.fim import with_suffix
from jaxserve.server.openai.foreign_fields import COMPLETION
from jaxserve.server.openai.hidden_states import asked_states, hidden_states_field
from jaxserve.server.openai.logprobs import CompletionLogprobs
from jaxserve.server.openai.params import (
    MAX_CHOICES,
    adapters_of,
    check,
    check_stream_options,
    count_prompts,
    rid_of,
    sampling_params,
    served_model,
    texts_or_ids,
)
from jaxserve.server.openai.protocol import CompletionRequest
from jaxserve.server.openai.replies import whole_reply
from jaxserve.server.openai.streaming import ChoiceEvents, StreamWriter, TextField
from jaxserve.server.requests import GenerateReqInput, GenerationChunk, PromptOptions, RequestError, TokenLogprob, new_rid
from jaxserve.server.routed_rank import rank_of_fields
from jaxserve.server.token_logprobs import logprobs_of_prompt

DEFAULT_MAX_TOKENS = 16
# Those of a long prompt come in several events.
_MOST_LOGPROBS_OF_EVENT = 1024

router = APIRouter(tags=["openai"])
_decoder = msgspec.json.Decoder(CompletionRequest)


@router.post("/v1/completions", response_class=Response, openapi_extra=json_body(CompletionRequest))
async def completions(request: Request) -> Response:
    """OpenAI's completions."""
    context = context_of(request)
    job = _Job.plan(await read_struct(request, _decoder, COMPLETION), context)
    if job.body.stream and job.asks_about_prompts:
        return PacedStream(_Events(job), context.service.generate(job.generate), context.service.lanes)
    if job.body.stream:
        stream = functools.partial(context.service.stream, job.generate)
        return EventStream(_Events(job), stream)
    return BlockResponse(await unless_disconnected(request.receive, job.reply()))


@router.post("/v1/completions/render", openapi_extra=json_body(CompletionRequest))
async def render(request: Request) -> list[dict[str, Any]]:
    """vLLM's, for routers that know what is cached: the token ids of the prompts of a completion. Nothing is generated."""
    context = context_of(request)
    job = _Job.plan(await read_struct(request, _decoder, COMPLETION), context)
    prompts = job.generate.input_ids or await encode_all(context.service, job.generate.prompts or [])
    rids = job.generate.rids or []
    return [{"request_id": rid, "model": job.model, "token_ids": ids} for rid, ids in zip(rids, prompts, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Job:
    """A checked request and all that shapes its reply."""

    body: CompletionRequest
    context: OpenAIContext
    model: str  # as the reply names it
    generate: GenerateReqInput
    reply_id: str
    created_s: int
    usage: Usage
    echoes: list[str]  # by prompt; what the text of a choice begins with
    logprobs: dict[int, CompletionLogprobs]  # by sequence, made when its first logprobs come

    @staticmethod
    def plan(body: CompletionRequest, context: OpenAIContext) -> _Job:
        args, service = context.args, context.service
        model = served_model(body.model, args, service.lora_adapters)
        _check(body, args.max_top_logprobs)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = sampling_params(body, max_tokens, {}, service.vocab_size, grammar=requested_grammar(body))
        service.check_num_sequences(count_prompts(body.prompt), params.n)
        prompts, input_ids = texts_or_ids(body.prompt, "prompt")
        _check_ids(input_ids or [], service.vocab_size, service.context_len)
        count = len(prompts or input_ids or [])
        reply_id, rids = _rids(body, count)
        options = PromptOptions(
            return_logprob=body.logprobs is not None or params.n > body.num_choices,  # which rank the samples
            top_logprobs_num=body.logprobs or 0,
            logprob_start_len=0 if body.echo and body.logprobs is not None else -1,
            priority=body.priority,
            extra_key=body.extra_key,
            cache_salt=body.cache_salt,
            custom_logit_processor=body.custom_logit_processor,
            return_hidden_states=asked_states(body),
            return_routed_experts=bool(body.return_routed_experts),
            routed_experts_start_len=body.routed_experts_start_len or 0,
            session_params=body.session_params,
        )
        adapters = adapters_of(body.lora_path, model, count)
        of_adapter = {adapter: msgspec.structs.replace(options, lora_path=adapter) for adapter in dict.fromkeys(adapters)}
        generate = GenerateReqInput(
            prompts=_filled_in(prompts, body.suffix, context) if body.suffix else prompts,
            input_ids=input_ids,
            sampling_params=[params] * count,
            rids=rids,
            options=[of_adapter[adapter] for adapter in adapters],
            stream=bool(body.stream),
            custom_labels=body.custom_labels,
            data_parallel_rank=rank_of_fields(body.routed_dp_rank, body.data_parallel_rank),
        )
        echoes = [""] * count
        if body.echo:
            echoes = prompts or [service.decode(ids[: service.context_len], False) for ids in input_ids or []]
        usage = Usage(params.n, args.enable_cache_report)
        return _Job(body, context, model.name, generate, reply_id, int(time.time()), usage, echoes, {})

    @property
    def asks_about_prompts(self) -> bool:
        return any(options.logprob_start_len >= 0 for options in self.generate.options)

    async def reply(self) -> list[bytes]:
        chunks = self.context.service.generate(self.generate)
        return await shaped(self.context.service.lanes, await gather(chunks, self.usage), self._shape)

    def _shape(self, sequences: list[Sequence]) -> list[bytes]:
        chosen = best_sequences(sequences, self.generate.num_samples, self.body.num_choices)
        choices = [self._choice(index, sequence) for index, sequence in enumerate(chosen)]
        return whole_reply(
            "text_completion", self.reply_id, self.created_s, choices, sequences, self.usage, self.body, self.model
        )

    def _choice(self, index: int, sequence: Sequence) -> dict[str, Any]:
        ending = Ending.of(sequence.finish_reason)
        choice: dict[str, Any] = {
            "index": index,
            "text": self.echoes[index // self.body.num_choices] + sequence.text,
            "logprobs": None if self.body.logprobs is None else self.shape_logprobs(index, sequence.all_logprobs),
            "finish_reason": ending.finish_reason,
            "matched_stop": ending.matched_stop,
        }
        choice |= hidden_states_field(self.body, sequence.hidden_states)
        return {**choice, "token_ids": sequence.token_ids} if self.body.return_token_ids else choice

    def shape_logprobs(self, index: int, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
        shaper = self.logprobs.get(index)
        if shaper is None:
            shaper = self.logprobs[index] = CompletionLogprobs(self.context.texts, bool(self.body.logprobs))
        return shaper.shape(entries)


class _Events(ChoiceEvents):
    def __init__(self, job: _Job) -> None:
        body, args = job.body, job.context.args
        writer = StreamWriter("text_completion", job.reply_id, job.created_s, body, job.model, args)
        super().__init__(writer, TextField(b'"text":', b""), job.usage, body)
        self._job = job

    def _hidden_states_event(self, chunk: GenerationChunk, field: dict[str, Any]) -> bytes:
        return self._writer.choice(chunk, self._text.json(""), None, None, field, self._usage)

    def _events(self, chunk: GenerationChunk, is_first: bool) -> Iterator[bytes]:
        job, text = self._job, chunk.text
        if is_first:
            text = job.echoes[chunk.index // job.generate.num_samples] + text
        if not (text or chunk.logprobs or chunk.finish_reason or (self._with_ids and chunk.token_ids)):
            return  # a token that completes no character yet
        entries = itertools.chain(logprobs_of_prompt(chunk.input_logprobs), chunk.logprobs)
        while logprobs := list(itertools.islice(entries, _MOST_LOGPROBS_OF_EVENT)):
            if len(logprobs) < _MOST_LOGPROBS_OF_EVENT:
                break
            part = job.shape_logprobs(chunk.index, logprobs)
            yield self._writer.choice(chunk, self._text.json(text), part, None, {}, self._usage)
            text = ""
        ending = None if chunk.finish_reason is None else Ending.of(chunk.finish_reason)
        last = job.shape_logprobs(chunk.index, logprobs) if logprobs else None
        yield self._writer.choice(chunk, self._text.json(text), last, ending, self._ids(chunk), self._usage)


def _check(body: CompletionRequest, max_top_logprobs: int) -> None:
    check_stream_options(body)
    check(body.max_tokens is None or body.max_tokens >= 0, "max_tokens", "at least 0", body.max_tokens)
    if body.best_of is not None:
        check(
            body.num_choices <= body.best_of <= MAX_CHOICES,
            "best_of",
            f"in [n={body.num_choices}, {MAX_CHOICES}]",
            body.best_of,
        )
        if body.stream and body.best_of > body.num_choices:
            raise RequestError("best_of above n cannot be streamed: the best are known at the end.", param="best_of")
    if body.logprobs is not None:
        check(0 <= body.logprobs <= max_top_logprobs, "logprobs", f"in [0, {max_top_logprobs}]", body.logprobs)


def _filled_in(prompts: list[str] | None, suffix: str, context: OpenAIContext) -> list[str]:
    if prompts is None:
        raise RequestError("suffix needs prompts of text, not of token ids.", param="suffix")
    return with_suffix(prompts, suffix, context.service.tokenizer, context.completion_template)


def _check_ids(prompts: list[list[int]], vocab_size: int, most_tokens: int) -> None:
    for ids in prompts:
        ids = ids[:most_tokens]  # what is longer is refused for that
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise RequestError(f"prompt must hold token ids in [0, {vocab_size}), got {wrong}.", param="prompt")


def _rids(body: CompletionRequest, count: int) -> tuple[str, list[str]]:
    """(the reply's id, one rid per prompt). Unless the client named each prompt, aborting the id aborts all."""
    if isinstance(body.rid, list) and count > 1:
        check(len(body.rid) == count, "rid", f"a string or {count} strings, one per prompt", body.rid)
        return body.rid[0], body.rid
    rid = rid_of(body) or f"cmpl-{new_rid()}"
    return rid, [rid] if count == 1 else [f"{rid}_{i}" for i in range(count)]
