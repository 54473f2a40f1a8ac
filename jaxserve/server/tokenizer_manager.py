"""The TokenizerManager: every request's way from the front door to the scheduler, and its chunks' way back.

    generate(GenerateReqInput) -> check -> tokenize -> TokenizedGenerateReqInput -> scheduler
    GenerationChunk <- LiveCall <- LiveTable.route <- BatchStrOut <- detokenizer

Runs on one asyncio loop, in the main process of a server or on the background thread of an Engine; `open` binds it to that
loop. It never imports JAX. It does not start or watch processes (`jaxserve.server.workers`) and decides nothing about the
life of the server (`jaxserve.server.pipeline`): that sets `status` and calls `fail`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zmq

from jaxserve.config import ServerArgs
from jaxserve.dispatcher import Dispatcher
from jaxserve.ipc import IpcPaths, Receiver, Sender
from jaxserve.messages import (
    AbortReq,
    BatchStrOut,
    BatchTokenizedGenerateReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    Message,
    ShutdownReq,
    TokenizedGenerateReqInput,
    TokenizerInput,
    WorkerFailed,
    WorkerReady,
)
from jaxserve.server.control.replies import ControlReplies
from jaxserve.server.live_requests import LiveCall, LiveSequence, LiveTable
from jaxserve.server.request_checks import (
    ModelLimits,
    cache_namespace,
    check_prompt,
    check_shape,
    fit_new_tokens,
    sample_params,
)
from jaxserve.server.requests import GenerateReqInput, GenerationChunk, RequestError, new_rid
from jaxserve.server.tokenizer import Tokenizer
from jaxserve.types import FinishReason, SamplingParams

logger = logging.getLogger(__name__)

Status = Literal["starting", "ready", "draining", "failed"]

# Text up to this length is tokenized on the loop (well under a millisecond); longer text in a thread.
INLINE_TOKENIZE_CHARS = 2000
# Messages read from the socket before other tasks get their turn.
_MESSAGES_PER_TURN = 64
_CONTROL_TIMEOUT_S = 30.0
_HEALTH_POLL_S = 0.02
HEALTH_CHECK_RID = "HEALTH_CHECK"

_ABORTED = FinishReason.abort("The request was aborted.")


class TokenizerManager:
    def __init__(self, args: ServerArgs, on_worker_event: Callable[[WorkerReady | WorkerFailed], None]) -> None:
        self.args = args
        self.status: Status = "starting"
        self.failure = ""  # why, once status is failed
        self.last_heartbeat_s = 0.0  # time.monotonic() of the last message from a worker
        self.generation_defaults: dict[str, Any] = {}
        self.resolved_options: dict[str, Any] = {}  # options that were None or auto, as the scheduler chose them
        self._tokenizer: Tokenizer | None = None
        self._limits: ModelLimits | None = None
        self._live = LiveTable()
        self._controls = ControlReplies()
        self._dispatch = Dispatcher(
            {
                BatchStrOut: self._live.route,
                FlushCacheReqOutput: self._controls.receive,
                GetInternalStateReqOutput: self._controls.receive,
                WorkerReady: on_worker_event,
                WorkerFailed: on_worker_event,
            }
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.Context[Any] | None = None
        self._receiver: Receiver | None = None
        self._to_scheduler: Sender | None = None

    # --- life

    def open(self, paths: IpcPaths) -> None:
        """Opens the sockets and reads them on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._receiver = Receiver(self._context, paths.tokenizer, TokenizerInput)
        self._to_scheduler = Sender(self._context, paths.scheduler)
        self._loop.add_reader(self._receiver.fd, self._read)
        self._loop.call_soon(self._read)  # the descriptor only tells of changes

    def close(self) -> None:
        """Ends the sockets; what the scheduler has not read by now is dropped."""
        if self._loop is None or self._receiver is None or self._to_scheduler is None or self._context is None:
            return
        self._loop.remove_reader(self._receiver.fd)
        self._receiver.close()
        self._to_scheduler.close(linger_ms=0)
        self._context.term()
        self._receiver = self._to_scheduler = self._context = None

    def load_tokenizer(self, *, hide_torch: bool) -> None:
        """Blocking; may run in a thread. Raises ValueError with a sentence for the user."""
        args = self.args
        self._tokenizer = Tokenizer.load(
            args.effective_tokenizer_path,
            trust_remote_code=args.trust_remote_code,
            chat_template=args.chat_template,
            hide_torch=hide_torch,
        )
        self.generation_defaults = _read_generation_config(args.model_path)

    def set_model(self, scheduler_info: dict[str, Any]) -> None:
        """What the scheduler said with its WorkerReady."""
        self._limits = ModelLimits.of(
            scheduler_info,
            max_top_logprobs=self.args.max_top_logprobs,
            allow_auto_truncate=self.args.allow_auto_truncate,
            follows_grammars=self.args.grammar_backend != "none",
        )
        given, resolved = self.args.public_dict(), scheduler_info.get("resolved_args", {})
        self.resolved_options = {k: v for k, v in resolved.items() if given[k] in (None, "auto")}

    def fail(self, reason: str) -> None:
        """The workers are gone: everything that waits ends now, and nothing new is taken."""
        self.status, self.failure = "failed", reason
        self._live.end_all(FinishReason.abort(reason, 500, "InternalServerError"))
        self._controls.fail_all(reason)

    def send_shutdown(self) -> None:
        self._send(ShutdownReq())

    # --- what the server tells about itself

    @property
    def is_ready(self) -> bool:
        return self.status == "ready"

    @property
    def num_live(self) -> int:
        """Sequences whose terminal message has not come."""
        return len(self._live)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise _unavailable("The server is starting.")
        return self._tokenizer

    @property
    def limits(self) -> ModelLimits:
        if self._limits is None:
            raise _unavailable("The server is starting.")
        return self._limits

    @property
    def context_len(self) -> int:
        return self.limits.context_len

    @property
    def vocab_size(self) -> int:
        return self.limits.vocab_size

    @property
    def model_info(self) -> dict[str, Any]:
        args, limits = self.args, self._limits
        preferred = args.preferred_sampling_params
        return {
            "model_path": args.model_path,
            "tokenizer_path": args.effective_tokenizer_path,
            "served_model_name": args.effective_served_model_name,
            "is_generation": True,
            "preferred_sampling_params": json.loads(preferred) if preferred else None,
            "weight_version": args.weight_version,
            "context_length": limits.context_len if limits else None,
            "vocab_size": limits.vocab_size if limits else None,
            "max_total_tokens": limits.max_total_tokens if limits else None,
        }

    # --- generating

    async def generate(self, req: GenerateReqInput, *, before_ready: bool = False) -> AsyncGenerator[GenerationChunk, None]:
        """Yields the chunks of all sequences as they come; ends when each had its last one.

        Raises RequestError before the first chunk for bad input and for a request that the scheduler refused. Closing the
        generator early aborts what still runs. `before_ready` is for the warm-up request.
        """
        if not before_ready:
            self._check_open()
        limits = self.limits
        check_shape(req, limits)
        call = LiveCall(req.num_sequences, return_logprob=req.return_logprob, received_s=time.time())
        sequences = self._register(req, call)
        started = False
        try:
            await self._send_request(req, sequences, limits, call.received_s)
            while chunks := await call.take():
                for chunk in chunks:
                    if not started:
                        _raise_if_refused(chunk)
                        started = True
                    if chunk.finish_reason is not None and self.args.log_requests:
                        _log_end(chunk)
                    yield chunk
        finally:
            self._leave(sequences)

    def _check_open(self) -> None:
        if self.status == "ready":
            return
        reasons = {
            "starting": "The server is starting.",
            "draining": "The server is shutting down.",
            "failed": f"The server has failed: {self.failure}",
        }
        raise _unavailable(reasons[self.status])

    def _register(self, req: GenerateReqInput, call: LiveCall) -> list[LiveSequence]:
        """Takes the rids, before anything is awaited: from here on a second request of one of them is refused."""
        bases = req.rids if req.rids is not None else [_draw_rid(req) for _ in range(req.num_prompts)]
        n = req.num_samples
        rids = [base if n == 1 else f"{base}_{j}" for base in bases for j in range(n)]
        taken = next((rid for rid in rids if rid in self._live), None)
        if taken is not None:
            raise RequestError(f"rid {taken!r} belongs to a request that is still running.", param="rid")
        if len(set(rids)) < len(rids):
            raise RequestError(f"The rids of a request must differ; got {bases!r}.", param="rid")
        sequences = [LiveSequence(rid, index, call) for index, rid in enumerate(rids)]
        for sequence in sequences:
            self._live.add(sequence)
        return sequences

    async def _send_request(
        self, req: GenerateReqInput, sequences: list[LiveSequence], limits: ModelLimits, received_s: float
    ) -> None:
        prompts = req.input_ids if req.input_ids is not None else await self._encode_prompts(req.prompts or [])
        checked = [check_prompt(ids, limits) for ids in prompts]
        rooms = [fit_new_tokens(p, len(ids), limits) for p, ids in zip(req.sampling_params, checked, strict=True)]
        if self.args.log_requests:
            rids, lens = [s.rid for s in sequences], [len(ids) for ids in checked]
            logger.info("Request %s: prompts of %s tokens, %s", rids, lens, req.sampling_params[0])
        n = req.num_samples
        batch = []
        for sequence in sequences:
            prompt, sample = divmod(sequence.index, n)
            if sequence.aborted:
                self._live.end(sequence, _ABORTED, len(checked[prompt]))
                continue
            if sequence.rid not in self._live:
                continue  # everything failed while this was being tokenized
            params = sample_params(req.sampling_params[prompt], sample, rooms[prompt])
            batch.append(self._to_scheduler_form(req, sequence, checked[prompt], params, received_s))
            sequence.sent = True
        if len(batch) == 1:
            self._send(batch[0])
        elif batch:
            self._send(BatchTokenizedGenerateReqInput(batch=batch))

    def _to_scheduler_form(
        self, req: GenerateReqInput, sequence: LiveSequence, ids: np.ndarray, params: SamplingParams, received_s: float
    ) -> TokenizedGenerateReqInput:
        return TokenizedGenerateReqInput(
            rid=sequence.rid,
            input_ids=ids,
            sampling_params=params,
            stream=req.stream,
            return_logprob=req.return_logprob,
            top_logprobs_num=req.top_logprobs_num if req.return_logprob else 0,
            priority=req.priority,
            extra_key=cache_namespace(req.extra_key, req.cache_salt),
            received_time_s=received_s,
        )

    def _leave(self, sequences: Sequence[LiveSequence]) -> None:
        """The call is over: what it has not seen the end of is aborted, at once and by exact rid."""
        for sequence in sequences:
            sequence.call = None
            if not sequence.sent:
                self._live.remove(sequence)
            elif self._live.holds(sequence):
                self._send(AbortReq(rid=sequence.rid, exact=True))

    # --- aborting and controlling

    def abort(self, rid_prefix: str) -> None:
        """Aborts every request whose rid starts with `rid_prefix`; each still ends with its one last chunk."""
        if not rid_prefix:
            raise RequestError("rid must not be empty; use abort_all to abort everything.", param="rid")
        self._abort_unsent(rid_prefix)
        self._send(AbortReq(rid=rid_prefix))

    def abort_all(self) -> None:
        self._abort_unsent("")
        self._send(AbortReq(abort_all=True))

    def _abort_unsent(self, rid_prefix: str) -> None:
        for sequence in self._live.unsent(rid_prefix):
            sequence.aborted = True

    async def flush_cache(self, timeout_s: float = 0.0) -> tuple[bool, str]:
        """Whether the cache was flushed, and why not; waits up to `timeout_s` for the scheduler to become idle."""
        self._check_open()
        reply: FlushCacheReqOutput = await self._controls.ask(
            self._send,
            lambda request_id: FlushCacheReqInput(request_id=request_id, timeout_s=timeout_s),
            timeout_s + _CONTROL_TIMEOUT_S,
        )
        return reply.success, reply.message

    async def internal_state(self) -> dict[str, Any]:
        if self.status == "starting":
            self._check_open()
        reply: GetInternalStateReqOutput = await self._controls.ask(
            self._send, lambda request_id: GetInternalStateReq(request_id=request_id), _CONTROL_TIMEOUT_S
        )
        return reply.state

    async def health_check(self, timeout_s: float) -> bool:
        """Whether a worker showed a sign of life within `timeout_s`; an idle pipeline is asked for one token."""
        asked_s = time.monotonic()
        probe = None if self.num_live else asyncio.create_task(self.generate_one_token())
        try:
            while time.monotonic() - asked_s < timeout_s:
                if self.last_heartbeat_s > asked_s:
                    return True
                if self.status == "failed":
                    return False
                await asyncio.sleep(_HEALTH_POLL_S)
            return False
        finally:
            if probe is not None:
                probe.cancel()
                with contextlib.suppress(asyncio.CancelledError, RequestError):
                    await probe

    async def generate_one_token(self, *, before_ready: bool = False) -> None:
        """One token through every process. Raises RequestError if it does not come out at the end."""
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        req = GenerateReqInput(input_ids=[[0]], sampling_params=[params], is_health_check=True)
        async with contextlib.aclosing(self.generate(req, before_ready=before_ready)) as chunks:
            async for chunk in chunks:
                reason = chunk.finish_reason
                if reason is not None and reason.type == "abort":
                    raise RequestError(f"The probe request was aborted: {reason.message}", status_code=503)

    # --- text

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of a conversation; RequestError if the template cannot render it."""
        try:
            return self.tokenizer.apply_chat_template(messages, tools, add_generation_prompt, continue_final_message, **kwargs)
        except ValueError as error:
            raise RequestError(str(error), param="messages") from error

    async def _encode_prompts(self, prompts: list[str]) -> list[list[int]]:
        if sum(map(len, prompts)) <= INLINE_TOKENIZE_CHARS:
            return self.tokenizer.encode_batch(prompts)
        return await asyncio.to_thread(self.tokenizer.encode_batch, prompts)

    # --- sockets

    def _send(self, message: Message) -> None:
        if self._to_scheduler is not None:  # else the workers are gone, and with them whoever the message was for
            self._to_scheduler.send(message)

    def _read(self) -> None:
        if self._receiver is None or self._loop is None:
            return
        messages = self._receiver.receive(_MESSAGES_PER_TURN)
        if messages:
            self.last_heartbeat_s = time.monotonic()
        for message in messages:
            try:
                self._dispatch(message)
            except Exception:  # one message must not keep the others from their receivers
                logger.exception("A message of type %s could not be handled.", type(message).__name__)
        if len(messages) == _MESSAGES_PER_TURN:
            self._loop.call_soon(self._read)


def _draw_rid(req: GenerateReqInput) -> str:
    return f"{HEALTH_CHECK_RID}_{new_rid()}" if req.is_health_check else new_rid()


def _unavailable(message: str) -> RequestError:
    return RequestError(message, status_code=503, err_type="ServiceUnavailableError")


def _raise_if_refused(chunk: GenerationChunk) -> None:
    """A request that ended in an error before its first token is an error reply, not a generation."""
    reason = chunk.finish_reason
    if reason is not None and reason.type == "abort" and reason.status_code and not chunk.completion_tokens:
        raise RequestError(
            reason.message or "The request was aborted.", reason.status_code, reason.err_type or "InternalServerError"
        )


def _log_end(chunk: GenerationChunk) -> None:
    reason = chunk.finish_reason
    logger.info(
        "Request %s ended: %s, %d prompt tokens (%d cached), %d new tokens, %.3f s",
        chunk.rid, reason.to_dict() if reason else None, chunk.prompt_tokens, chunk.cached_tokens,
        chunk.completion_tokens, chunk.meta.get("e2e_latency", 0.0),
    )  # fmt: skip


def _read_generation_config(model_path: str) -> dict[str, Any]:
    """The model's sampling defaults, if it brings any."""
    path = Path(model_path) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return values if isinstance(values, dict) else {}
