"""A GenerationService one can compute by hand: token j of every sequence is the letter chr(97 + j % 26), unless a script says
what it is."""

from __future__ import annotations

import asyncio
import contextlib
import string
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import numpy as np

from jaxserve.config import ServerArgs
from jaxserve.messages import HiddenStates, InputLogprobs, TokenLogprobs
from jaxserve.scheduler.control.abort_request import AbortRequest, AbortRequestOutput, rid_prefix
from jaxserve.scheduler.control.block_input import BlockInputReqOutput
from jaxserve.scheduler.control.close_session import CloseSessionReqOutput
from jaxserve.scheduler.control.configure_logging import ConfigureLoggingReqOutput
from jaxserve.scheduler.control.continue_generation import ContinueGenerationReqOutput
from jaxserve.scheduler.control.declaration import ControlError, ControlStruct
from jaxserve.scheduler.control.dump_expert_distribution_record import DumpExpertDistributionReqOutput
from jaxserve.scheduler.control.flush_cache import FlushCacheReqOutput
from jaxserve.scheduler.control.freeze_gc import FreezeGCReqOutput
from jaxserve.scheduler.control.get_internal_state import GetInternalStateReqOutput
from jaxserve.scheduler.control.load_lora_adapter import LoRAUpdateOutput
from jaxserve.scheduler.control.open_session import OpenSessionReqOutput
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqOutput
from jaxserve.scheduler.control.registry import control_of
from jaxserve.scheduler.control.release_memory_occupation import ReleaseMemoryOccupationReqOutput
from jaxserve.scheduler.control.resume_memory_occupation import ResumeMemoryOccupationReqOutput
from jaxserve.scheduler.control.set_internal_state import SetInternalStateReqOutput
from jaxserve.scheduler.control.set_trace_level import SetTraceLevelReqOutput
from jaxserve.scheduler.control.slow_down import SlowDownReqOutput
from jaxserve.scheduler.control.start_expert_distribution_record import ExpertDistributionReqOutput
from jaxserve.scheduler.control.start_profile import ProfileReqOutput
from jaxserve.scheduler.control.stop_expert_distribution_record import StopExpertDistributionReqOutput
from jaxserve.scheduler.control.stop_profile import StopProfileReqOutput
from jaxserve.scheduler.control.unblock_input import UnblockInputReqOutput
from jaxserve.scheduler.control.update_weight_version import UpdateWeightVersionReqOutput
from jaxserve.scheduler.control.update_weights_from_disk import UpdateWeightFromDiskReqOutput
from jaxserve.scheduler.control.update_weights_from_tensor import TensorUpdateOutput
from jaxserve.server.chat_templates import TemplateArguments
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.request_checks import ModelLimits
from jaxserve.server.requests import GenerateReqInput, GenerationChunk, PromptOptions, RequestError, TokenLogprob, new_rid
from jaxserve.server.sinks import ChunkSink, pulled
from jaxserve.server.text_lanes import TextLanes
from jaxserve.timeline import RequestTimeline
from jaxserve.types import FinishReason, SamplingParams

CONTEXT_LEN = 100
VOCAB_SIZE = 1000
HIDDEN_SIZE = 2
LIMITS = ModelLimits(
    context_len=CONTEXT_LEN,
    vocab_size=VOCAB_SIZE,
    hidden_size=HIDDEN_SIZE,
    max_total_tokens=1000,
    max_top_logprobs=5,
    allow_auto_truncate=False,
)
BOS = 1
EOS = 2


class FakeTokenizer:
    """A character is a token, its id the code point; encoding adds a BOS."""

    separates_pairs = False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + [ord(c) for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join("<s>" * (not skip_special_tokens) if i == BOS else chr(i) for i in ids)


def counting(**options: Any) -> ServerMetrics:
    """Without workers."""

    async def nobody(answered: Any) -> None: ...

    return ServerMetrics(ServerArgs(**{"model_path": "m", **options}), nobody)


class FakeService:
    def __init__(self) -> None:
        self.status = "ready"
        self.num_programs_missing = 0
        self.tokenizer = FakeTokenizer()
        self.lanes = TextLanes()
        self.model_info: dict[str, Any] = {
            "model_path": "/models/tiny",
            "weight_version": "default",
            "context_length": CONTEXT_LEN,
        }
        self.lora_adapters: dict[str, str] = {}
        self.limits = LIMITS
        self.context_len = CONTEXT_LEN
        self.vocab_size = VOCAB_SIZE
        self.generation_defaults: dict[str, Any] = {}
        self.resolved_options: dict[str, Any] = {"page_size": 16}
        self.template_arguments = TemplateArguments()
        self.chat_template: str | None = None
        self.num_live = 0
        self.num_live_by_rank = [0]
        self.replica_states = ["up"]
        self.metrics: ServerMetrics | None = counting()
        self.timelines: list[RequestTimeline] = []
        self.thinking_end: str | None = None
        self.requests: list[GenerateReqInput] = []
        self.templated: list[dict[str, Any]] = []  # arguments of apply_chat_template
        self.aborted: list[str] = []  # rids of requests that were left before their end
        self.controls: list[ControlStruct] = []
        self.asked_for: list[tuple[int, int]] = []  # prompts and n that a route asked for before it worked on them
        state = {
            "dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 32, "num_pending_tokens": 7,
            "max_total_num_tokens": 64, "max_running_requests": 8, "token_usage": 0.5, "last_gen_throughput": 9.5,
            "cache_hit_rate": 0.25, "num_grammar_queue_reqs": 0, "num_paused_reqs": 0, "num_retracted_reqs": 1,
            "avg_spec_accept_length": None, "spec_accept_rate": None, "page_size": 16, "leaks": 0,
        }  # fmt: skip
        self.control_replies: dict[str, list[Any]] = {
            "get_internal_state": [GetInternalStateReqOutput(state)],
            "flush_cache": [FlushCacheReqOutput(success=True)],
            "abort_request": [AbortRequestOutput()],
            "pause_generation": [PauseGenerationReqOutput()],
            "continue_generation": [ContinueGenerationReqOutput()],
            "block_input": [BlockInputReqOutput()],
            "unblock_input": [UnblockInputReqOutput()],
            "slow_down": [SlowDownReqOutput(0.5)],
            "start_profile": [ProfileReqOutput("Profiling to /p.", "/p")],
            "set_trace_level": [SetTraceLevelReqOutput(2)],
            "stop_profile": [StopProfileReqOutput("The profile is in /p.", "/p")],
            "start_expert_distribution_record": [ExpertDistributionReqOutput("Recording.")],
            "stop_expert_distribution_record": [StopExpertDistributionReqOutput("The record is complete.")],
            "dump_expert_distribution_record": [DumpExpertDistributionReqOutput("The record is in /r.", "/r")],
            "open_session": [OpenSessionReqOutput("mine")],
            "close_session": [CloseSessionReqOutput()],
            "configure_logging": [ConfigureLoggingReqOutput("info")],
            "freeze_gc": [FreezeGCReqOutput(1), FreezeGCReqOutput(2)],
            "set_internal_state": [SetInternalStateReqOutput(True, {})],
            "release_memory_occupation": [ReleaseMemoryOccupationReqOutput(())],
            "resume_memory_occupation": [ResumeMemoryOccupationReqOutput(())],
            "load_lora_adapter": [LoRAUpdateOutput(True, "", {"sql": "/adapters/sql"})],
            "load_lora_adapter_from_tensors": [LoRAUpdateOutput(True, "", {"policy-7": "/adapters/5d41"})],
            "unload_lora_adapter": [LoRAUpdateOutput(True)],
            "update_weight_version": [UpdateWeightVersionReqOutput(True, "Done.", "v2")],
            "update_weights_from_disk": [UpdateWeightFromDiskReqOutput(True, "Done.")],
            "update_weights_from_tensor": [TensorUpdateOutput(True, "Done.", True, True, "v2")],
            "update_weights_from_distributed": [TensorUpdateOutput(True, "Done.", True, True, "v2")],
            "begin_weight_update": [TensorUpdateOutput(True, "Done.")],
            "end_weight_update": [TensorUpdateOutput(True, "Done.", True, True, "v2")],
        }
        self.is_paused = False
        self.healthy = True
        self.step_s = 0.0  # time between tokens
        self.endless = False  # ignore max_new_tokens
        self.script: list[str] | None = None  # the text of each chunk of every sequence, which then ends by itself
        self.fail_after: tuple[int, FinishReason] | None = None  # end every sequence so after that many tokens
        self.crash: Exception | None = None
        self.steps = 0
        self.logprob_of: Callable[[int], float] = lambda token: -2.0  # of each token of token_ids_logprob
        # Of requests for vectors: what the model makes of a prompt's tokens.
        self.vectors_of: Callable[[list[int]], Any] = lambda ids: [len(ids), ids[1], ids[-1]]

    @property
    def is_ready(self) -> bool:
        return self.status == "ready" and not self.is_paused

    tracer = None

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        if self.metrics is None:
            raise RequestError("/metrics needs a server without --no-enable-metrics.", 404, "NotFoundError")
        return await self.metrics.scrape(accept, {})

    async def recent_requests(self) -> list[RequestTimeline]:
        return self.timelines

    def check_num_sequences(self, num_prompts: int, n: int) -> None:
        self.asked_for.append((num_prompts, n))

    def generate(self, req: GenerateReqInput) -> AsyncGenerator[GenerationChunk, None]:
        return pulled(self.stream, req)

    @contextlib.asynccontextmanager
    async def stream(self, req: GenerateReqInput, sink: ChunkSink) -> AsyncIterator[None]:
        self._check(req)
        feeding = asyncio.create_task(self._feed(req, sink))
        try:
            yield
        finally:
            feeding.cancel()
            await asyncio.wait((feeding,))

    async def _feed(self, req: GenerateReqInput, sink: ChunkSink) -> None:
        async with contextlib.aclosing(self._chunks(req)) as chunks:
            async for chunk in chunks:
                sink.push(chunk)
        sink.end()

    def _check(self, req: GenerateReqInput) -> None:
        self.requests.append(req)
        if not req.pools:
            self.limits.check_generates()
        for params in req.sampling_params:
            try:
                params.verify(VOCAB_SIZE)
            except ValueError as error:
                raise RequestError(str(error)) from None
        if not req.num_prompts:
            raise RequestError("The request holds no prompt.", param="text")
        if req.num_samples > 512:
            raise RequestError(f"n is too large, got {req.num_samples}.", param="n")
        if self.crash is not None:
            raise self.crash
        if any(not 0 <= token < 1 << 31 for ids in req.input_ids or () for token in ids):  # as the real one, which knows more
            raise RequestError("input_ids must lie in the vocabulary.", param="input_ids")
        longest = max(map(len, self._prompts(req)))
        if longest >= CONTEXT_LEN:
            raise RequestError(f"The prompt has {longest} tokens; limit {CONTEXT_LEN}.", code="context_length_exceeded")

    def _prompts(self, req: GenerateReqInput) -> list[list[int]]:
        if req.input_embeds is not None:
            return [[-1] * embeds.length for embeds in req.input_embeds]
        if req.pairs is not None:
            return [self.tokenizer.encode(pair.first) + self.tokenizer.encode(pair.second) for pair in req.pairs]
        return req.input_ids or [self.tokenizer.encode(text) for text in req.prompts or []]

    async def _chunks(self, req: GenerateReqInput) -> AsyncGenerator[GenerationChunk, None]:
        prompts = self._prompts(req)
        req.prompt_ids = [np.array(prompt, np.int32) for prompt in prompts]
        bases = req.rids or [new_rid() for _ in prompts]
        n = req.num_samples
        rids = [base if n == 1 else f"{base}_{j}" for base in bases for j in range(n)]
        if req.pools:
            for index in reversed(range(req.num_prompts)):
                yield self._pooled(index, rids[index], prompts[index])
            return
        live = dict.fromkeys(range(req.num_sequences))
        self.num_live += len(live)
        try:
            step = 0
            while live:
                await asyncio.sleep(self.step_s)
                step, self.steps = step + 1, self.steps + 1
                for index in list(live):
                    chunk = self._chunk(req, index, rids[index], prompts[index // n], step)
                    if chunk.finish_reason is not None:
                        del live[index]
                        self.num_live -= 1
                    yield chunk
        finally:
            self.aborted += [rids[index] for index in live]
            self.num_live -= len(live)

    def _chunk(self, req: GenerateReqInput, index: int, rid: str, prompt: list[int], step: int) -> GenerationChunk:
        params, options = req.sampling_params[index // req.num_samples], req.options_of(index)
        if self.script is not None:
            return self._scripted(req, index, rid, len(prompt), self.script[:step], is_last=step == len(self.script))
        letter = string.ascii_lowercase[(step - 1) % 26]
        reason = self._reason(params, letter, step)
        text = letter if reason is None or reason.type == "length" or params.no_stop_trim else ""
        top = [(ord(letter), -0.5), (ord("z"), -1.5)][: options.top_logprobs_num]
        logprobs = [TokenLogprob(ord(letter), -0.5, top)] if options.return_logprob else []
        meta = {"e2e_latency": 0.25} if reason else {}
        chunk = GenerationChunk(index, rid, text, [ord(letter)], logprobs, len(prompt), step, 3, reason, meta)
        if options.return_logprob and options.token_ids_logprob:
            logprobs[0].id_logprobs = [self.logprob_of(token) for token in options.token_ids_logprob]
        if options.return_logprob and options.logprob_start_len >= 0 and step == 1:
            chunk.input_logprobs = _input_logprobs(prompt[options.logprob_start_len :], options)
        if options.return_hidden_states:
            states = np.array([[step, 0.5]], np.float32)
            chunk.hidden_states = [HiddenStates(prompt=states) if step == 1 else HiddenStates(outputs=states)]
        if options.return_routed_experts:
            chunk.experts = [np.full((1, 2, 3), step, np.int32)]
        return chunk

    def _pooled(self, index: int, rid: str, prompt: list[int]) -> GenerationChunk:
        reason = self.fail_after[1] if self.fail_after else FinishReason.length_limit(0)
        chunk = GenerationChunk(index, rid, "", [], [], len(prompt), 0, 0, reason, {"e2e_latency": 0.25})
        if not self.fail_after:
            chunk.pooled = np.array(self.vectors_of(prompt), np.float32, ndmin=2)
        return chunk

    def _scripted(
        self, req: GenerateReqInput, index: int, rid: str, prompt_len: int, texts: list[str], *, is_last: bool
    ) -> GenerationChunk:
        ids = [ord(char) for char in texts[-1]]
        logprobs = [TokenLogprob(id_, -0.5, []) for id_ in ids] if req.options_of(index).return_logprob else []
        count, limit = sum(map(len, texts)), req.sampling_params[index // req.num_samples].max_new_tokens
        reason = FinishReason.stop(EOS) if is_last else None
        if limit is not None and limit <= count:
            reason = FinishReason.length_limit(count)
        if self.fail_after and len(texts) >= self.fail_after[0]:
            reason = self.fail_after[1]
        meta = {"e2e_latency": 0.25} if reason else {}
        return GenerationChunk(index, rid, texts[-1], ids, logprobs, prompt_len, count, 3, reason, meta, "v1")

    def _reason(self, params: SamplingParams, letter: str, step: int) -> FinishReason | None:
        if self.fail_after and step >= self.fail_after[0]:
            return self.fail_after[1]
        if letter in params.stop:
            return FinishReason.stop(letter)
        if ord(letter) in params.stop_token_ids:
            return FinishReason.stop(ord(letter))
        limit = 8 if params.max_new_tokens is None else params.max_new_tokens
        return FinishReason.length_limit(step) if step >= limit and not self.endless else None

    async def control(self, request: ControlStruct) -> list[Any]:
        self.controls.append(request)
        if isinstance(request, AbortRequest):
            try:
                rid_prefix(request)
            except ControlError as error:
                raise RequestError(str(error)) from None
        return self.control_replies[control_of(type(request)).name]

    async def health_check(self, timeout_s: float) -> bool:
        return self.healthy

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode([token_id], False).encode()

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        if messages[0]["content"] == "unrenderable":
            raise RequestError("The chat template cannot render these messages.", param="messages")
        self.templated.append(
            {
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                **kwargs,
            }
        )
        return self.tokenizer.encode("|".join(f"{m['role']}:{m['content']}" for m in messages))


def _input_logprobs(ids: list[int], options: PromptOptions) -> InputLogprobs:
    known, ids_asked = len(ids[1:]), len(options.token_ids_logprob or ())
    logprobs = TokenLogprobs(logprobs=np.full(known, -1.0, np.float32))
    if options.top_logprobs_num:
        logprobs.top_ids, logprobs.top_logprobs = np.full((known, 1), BOS, np.int32), np.full((known, 1), -0.75, np.float32)
    if ids_asked:
        logprobs.id_logprobs = np.full((known, ids_asked), -3.0, np.float32)
    return InputLogprobs(token_ids=np.array(ids, np.int32), logprobs=logprobs)
