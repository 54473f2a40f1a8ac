"""The TokenizerManager: what the front doors talk to. It knows whether the server takes requests, and who serves which.

    stream    -> `jaxserve.server.generation`         control -> `jaxserve.server.control.client`
    channels  -> `jaxserve.server.worker_link`        text    -> `jaxserve.server.tokenizer`

Runs on one asyncio loop, in the main process of a server or on the background thread of an Engine; `open` binds it to that
loop. It never imports JAX. It does not start or watch processes (`jaxserve.server.workers`) and decides nothing about the
life of the server (`jaxserve.server.pipeline`): that sets `status` and calls `fail`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal

import msgspec

from jaxserve.config import ServerArgs
from jaxserve.config.lora import split_lora_path
from jaxserve.data_parallel import Prompt
from jaxserve.dispatcher import Dispatcher
from jaxserve.ipc import Channels
from jaxserve.messages import (
    DETOKENIZER,
    FRONT,
    TOKENIZER,
    BatchStrOut,
    ControlReply,
    Message,
    ProfileBegan,
    ProfileEnded,
    ShutdownReq,
    TokenizerInput,
    WorkerAddress,
    WorkerFailed,
    WorkerProgress,
    WorkerReady,
)
from jaxserve.models import generation_defaults
from jaxserve.parsers.reasoning import REASONING_FORMATS
from jaxserve.scheduler.control.abort_request import AbortRequest
from jaxserve.scheduler.control.declaration import ControlStruct
from jaxserve.scheduler.control.get_metrics import GetMetricsReq, GetMetricsReqOutput
from jaxserve.scheduler.control.given_adapters import GivenAdapters
from jaxserve.scheduler.control.update_weights_from_disk import ServedWeights
from jaxserve.server.chat_templates import TemplateArguments
from jaxserve.server.control.client import ControlClient
from jaxserve.server.fronts.shared import Shared
from jaxserve.server.generation import Generation
from jaxserve.server.host_spans import HostSpans, merge
from jaxserve.server.journal.journal import Journal
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.output_routes import Routes
from jaxserve.server.probes import is_alive, probe_replica
from jaxserve.server.replicas import Replicas
from jaxserve.server.reply_limits import ReplyLimits
from jaxserve.server.request_checks import ModelLimits, encode_prompt, without_tokenizer
from jaxserve.server.requests import ERR_TYPES, GenerateReqInput, GenerationChunk, RequestError
from jaxserve.server.sessions import Sessions
from jaxserve.server.sinks import ChunkSink, pulled
from jaxserve.server.text_lanes import TextLanes
from jaxserve.server.timelines import log_times
from jaxserve.server.tokenizer import Tokenizer
from jaxserve.server.tracing import Tracer
from jaxserve.server.vectors import describe_vectors
from jaxserve.server.worker_link import WorkerLink
from jaxserve.timeline import RequestTimeline
from jaxserve.types import FinishReason

logger = logging.getLogger(__name__)

_SHOWN_REQUESTS = 100  # of those that are live, when somebody asks

# restarting: no replica is left, but some are being started again.
Status = Literal["starting", "ready", "restarting", "draining", "failed"]


class TokenizerManager:
    def __init__(
        self,
        args: ServerArgs,
        workers: Sequence[WorkerAddress],
        on_worker_event: Callable[[WorkerReady | WorkerFailed], None],
        *,
        own: WorkerAddress = WorkerAddress(TOKENIZER),
        receives: Any = TokenizerInput,
        shared: Shared | None = None,
    ) -> None:
        """`own`: where messages come to, of the kinds that it `receives`. `shared`: with other processes of this server that
        have a TokenizerManager; None: it is alone."""
        self.args = args
        self._shared = shared
        self._on_worker_event = on_worker_event
        self.status: Status = "starting"
        self._programs_missing: dict[WorkerAddress, int] = {}  # of workers that serve and are still warming up
        self.is_paused = False  # generation, by pause_generation
        self.is_input_blocked = False  # by block_input
        self.released_memory: tuple[str, ...] = ()  # by release_memory_occupation
        self.weights = ServedWeights(args.model_path, args.load_format, args.weight_version)
        self.lora_adapters = dict(map(split_lora_path, args.lora_paths or ()))  # that are loaded: by name, their folders
        self.given_adapters = GivenAdapters()
        self.failure = ""  # why, once status is failed
        self.generation_defaults: dict[str, float | int] = {}  # of the model, under SamplingParams' names
        self.resolved_options: dict[str, Any] = {}  # options that were None or auto, as the scheduler chose them
        self._tokenizer: Tokenizer | None = None
        self._model: dict[str, Any] | None = None  # what schedulers said of it
        self._limits: ModelLimits | None = None
        self._link = WorkerLink(workers, self._deliver, self._end_turn, own=own, kinds=receives)
        self.replicas = Replicas(args, self._link, shared, self._prompt_dispatched)
        self.lanes = TextLanes()
        self.template_arguments = TemplateArguments.of(args)
        self.journal = Journal(args, self._decode_prompt)
        self.tracer = Tracer.of(args)
        self.metrics = ServerMetrics(args, self._ask_for_metrics) if args.enable_metrics else None
        self._generation = Generation(
            self.replicas.controller,
            self.replicas.send,
            self.lanes,
            self.journal,
            self.metrics,
            self.tracer,
            shared,
            Routes(own.rank if own.kind == FRONT else None, args.tokenizer_worker_num, args.detokenizer_worker_num),
        )
        self.timelines = self._generation.timelines
        if args.enable_request_time_stats_logging:
            self.timelines.observers.append(log_times)
        self._controls = ControlClient(self, self._link)
        self._spans = HostSpans()
        self._dispatch = Dispatcher(self._handlers())

    def _handlers(self) -> dict[type[Message], Callable[[Any], None]]:
        """What is done with what arrives."""
        return {
            BatchStrOut: self._receive_texts,
            ControlReply: self._controls.receive,
            ProfileBegan: self._spans.begin,
            ProfileEnded: self._complete_trace,
            WorkerReady: self._on_worker_event,
            WorkerProgress: self._on_progress,
            WorkerFailed: self._on_worker_event,
        }

    # --- life

    def open(self, channels: Channels) -> None:
        """Opens its ends of the channels and reads on the running loop."""
        if self._shared is not None:
            self._shared.open(channels.folder)
        self.given_adapters.open(channels.folder)
        self._link.open(channels)

    def close(self) -> None:
        """Closes them; what the workers have not read by now is dropped."""
        self._link.close()
        self.given_adapters.close()
        if self._shared is not None:
            self._shared.close()
        self.lanes.close()
        self.journal.close()
        if self.tracer is not None:
            self.tracer.close()
        if self.metrics is not None:
            self.metrics.close()

    def _deliver(self, message: Any) -> None:
        self._dispatch(message)

    def _receive_texts(self, out: BatchStrOut) -> None:
        if not self.replicas.has(out.source):
            return  # its process is gone, and its requests have their answers
        with self._spans("texts to their readers", len(out.rids)):
            self._generation.receive(out, hold=self._link.is_behind)

    def _complete_trace(self, message: ProfileEnded) -> None:
        processes = {**message.spans, "main": self._spans.end(message)}
        threading.Thread(
            target=merge, args=(message.folder, message.ended_ns, processes), name="merge-trace", daemon=True
        ).start()

    def _end_turn(self) -> None:
        self._generation.release()
        self._share()

    def _share(self) -> None:
        """Lets the other processes know what this one has to do."""
        if self._shared is not None:
            self._shared.write(self._generation.num_live, self.replicas.controller.replicas)

    def load_tokenizer(self, *, hide_torch: bool) -> Tokenizer | None:
        """Blocking; may run in a thread. Raises ValueError with a sentence for the user. None: there is to be none."""
        args = self.args
        self.generation_defaults = generation_defaults(args.model_path)
        if not args.skip_tokenizer_init:
            self._tokenizer = Tokenizer.load(
                args.effective_tokenizer_path,
                trust_remote_code=args.trust_remote_code,
                chat_template=args.chat_template,
                chat_template_name=args.hf_chat_template_name,
                hide_torch=hide_torch,
            )
        return self._tokenizer

    def set_model(self, infos: Mapping[WorkerAddress, dict[str, Any]]) -> None:
        """What the schedulers said with their WorkerReady."""
        scheduler_info = dict(next(iter(infos.values())))
        # Any of them may get a request: what all have room for.
        scheduler_info["max_total_tokens"] = min(info["max_total_tokens"] for info in infos.values())
        for worker, info in infos.items():
            self.replicas.serves(worker, info["max_total_tokens"])
        self._set_limits(scheduler_info)

    def _set_limits(self, scheduler_info: dict[str, Any]) -> None:
        """What follows from the model, and from how a scheduler serves it."""
        self._model = scheduler_info
        self._limits = ModelLimits.of(
            scheduler_info,
            self.args,
            ReplyLimits.of(scheduler_info, self.args),
            None if self.args.reasoning_parser is None else REASONING_FORMATS[self.args.reasoning_parser],
        )
        given, resolved = self.args.public_dict(), scheduler_info.get("resolved_args", {})
        self.resolved_options = {k: v for k, v in resolved.items() if given[k] in (None, "auto")}

    def set_max_queued(self, max_queued: int | None) -> None:
        """As a control request changed it."""
        self._limits = dataclasses.replace(self.limits, max_queued=max_queued)

    def configure_journal(self, changes: dict[str, Any]) -> None:
        """As a control request wants it."""
        self.journal.configure(dataclasses.replace(self.journal.settings, **changes))

    # --- replicas

    def replica_lost(self, worker: WorkerAddress, reason: str, *, restarts: bool) -> None:
        """Its process is gone: its requests end, the others' go on. `reason` as in `fail`. `restarts`: it will be back."""
        replica, message = self.replicas.lost(worker), f"{reason} The request could not be finished."
        self._programs_missing.pop(worker, None)
        self._generation.end_replica(replica, FinishReason.abort(message, 500, "InternalServerError"))
        self._controls.worker_gone(worker, message)
        if self.metrics is not None:
            self.metrics.worker_gone(worker)
        if restarts and self.status == "ready" and not self.replicas.num_up:
            self.status = "restarting"

    def replica_joins(self, worker: WorkerAddress) -> None:
        """A process was started in place of one that is gone; `replica_back` when it is ready."""
        self.replicas.joins(worker)
        if self.metrics is not None:
            self.metrics.replica_restarted(worker.rank)

    async def replica_back(self, worker: WorkerAddress, info: dict[str, Any]) -> None:
        """A new process is ready: it is told what the others were told, proves itself, and serves. Raises RequestError."""
        told = await self._controls.bring_up_to_date(worker)
        if not self.is_paused and not self.is_input_blocked and not self.released_memory:
            await probe_replica(self, worker.rank, before_ready=True)
            await self._controls.bring_up_to_date(worker, told)
        self.replicas.serves(worker, info["max_total_tokens"])
        least = min(self.limits.max_total_tokens, info["max_total_tokens"])
        self._limits = dataclasses.replace(self.limits, max_total_tokens=least)
        if self.status == "restarting":
            self.status = "ready"

    def forget_caches(self) -> None:
        """No replica has anything cached."""
        self.replicas.controller.forget_caches()

    def _prompt_dispatched(self, rank: int, prompt: Prompt) -> None:
        """Whoever else sends requests is to know."""

    # --- what has been going on

    def _decode_prompt(self, ids: list[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=False)

    def log_live_requests(self, reason: str) -> None:
        """What runs, when somebody asks; also to the crash dump, if there is one."""
        live = self._generation.ages()
        logger.warning("%s: %d live requests; the stacks of all processes follow.", reason, len(live))
        for rid, age_s in live[:_SHOWN_REQUESTS]:
            logger.warning("Live request: rid=%r, %.3f s", rid, age_s)
        self.journal.dump_for_crash(reason)

    def own_recent_requests(self) -> list[RequestTimeline]:
        """Time lines of the newest requests that have ended, and of all that have not: those of this process."""
        return self._generation.recent_requests()

    async def recent_requests(self) -> list[RequestTimeline]:
        """Of all processes."""
        return self.own_recent_requests()

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """The metrics of all processes, in a form that `accept` names, and their content type."""
        if self.metrics is None:
            raise RequestError("/metrics needs a server without --no-enable-metrics.", 404, ERR_TYPES[404])
        gauges: dict[str, float | dict[tuple[str, ...], float]] = {
            "num_live_sequences": self.num_live,
            "num_sessions": len(self.sessions),
            "session_held_tokens": self.sessions.num_tokens,
            "server_ready": float(self.is_ready),
            **self.replicas.gauges(),
        }
        return await self.metrics.scrape(accept, gauges)

    async def _ask_for_metrics(self, answered: Callable[[WorkerAddress, GetMetricsReqOutput], None]) -> None:
        if self.status in ("ready", "draining"):
            await self._controls.tell_each(GetMetricsReq(), answered)

    def fail(self, reason: str) -> None:
        """The workers are gone: everything that waits ends now, and nothing new is taken. `reason` is a sentence that clients
        read: the operator's details belong in the log."""
        self.status, self.failure = "failed", reason
        message = f"{reason} The request could not be finished."
        self._generation.end_all(FinishReason.abort(message, 500, "InternalServerError"))
        self._controls.fail_all(message)

    async def others_told(self, fronts: Sequence[WorkerAddress] | None = None) -> None:
        """Returns when all front processes, or these, go by what holds now."""

    def send_fronts_shutdown(self) -> None:
        """They flush what their clients have not read, and end."""

    def send_shutdown(self) -> None:
        """To all workers that have no more to do; in place of a scheduler that is gone to those who wait for it to say so."""
        self.send_fronts_shutdown()
        for rank, state in enumerate(self.replicas.states):
            if state == "down":
                for detokenizer in range(self.args.detokenizer_worker_num):
                    self._link.send(WorkerAddress(DETOKENIZER, detokenizer), ShutdownReq())
            else:
                self.replicas.send(rank, ShutdownReq())

    def _on_progress(self, message: WorkerProgress) -> None:
        if not self.replicas.has(message.worker):
            return
        self._programs_missing[message.worker] = message.programs_missing

    # --- what the server tells about itself

    @property
    def is_ready(self) -> bool:
        """New requests are served."""
        return self.status == "ready" and not self.is_paused and not self.is_input_blocked and not self.released_memory

    @property
    def num_programs_missing(self) -> int:
        """Programs that are still being compiled; until then steps may take longer."""
        return sum(self._programs_missing.values())

    @property
    def num_live(self) -> int:
        """Sequences whose terminal message has not come."""
        return self._generation.num_live if self._shared is None else self._shared.num_live(self._generation.num_live)

    @property
    def num_live_by_rank(self) -> list[int]:
        return self.replicas.num_sequences

    @property
    def replica_states(self) -> list[str]:
        """By rank: joining, up or down."""
        return self.replicas.states

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError while there is none."""
        if self.args.skip_tokenizer_init:
            raise without_tokenizer("A text")
        if self._tokenizer is None:
            raise _unavailable("The server is starting.")
        return self._tokenizer

    @property
    def chat_template(self) -> str | None:
        """None: there is none, or no tokenizer."""
        template = None if self._tokenizer is None else self._tokenizer.hf.chat_template
        return template if isinstance(template, str) else None

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

    def check_num_sequences(self, num_prompts: int, n: int) -> None:
        self.limits.check_num_sequences(num_prompts, n)

    @property
    def thinking_end(self) -> str | None:
        """The tag with which the model's thinking ends; None: not known."""
        name = self.args.reasoning_parser
        return None if name is None else REASONING_FORMATS[name].end

    @property
    def model_info(self) -> dict[str, Any]:
        args, limits = self.args, self._limits
        preferred = args.preferred_sampling_params
        return {
            **msgspec.structs.asdict(self.weights),
            "tokenizer_path": args.effective_tokenizer_path,
            "served_model_name": args.effective_served_model_name,
            "is_generation": limits.generates if limits else None,
            "vectors": describe_vectors(limits.vectors) if limits else None,
            "reasoning_parser": args.reasoning_parser,
            "tool_call_parser": args.tool_call_parser,
            "lora_adapters": self.lora_adapters,
            "preferred_sampling_params": json.loads(preferred) if preferred else None,
            "context_length": limits.context_len if limits else None,
            "vocab_size": limits.vocab_size if limits else None,
            "max_total_tokens": limits.max_total_tokens if limits else None,
        }

    # --- generating

    def stream(
        self, req: GenerateReqInput, sink: ChunkSink, *, before_ready: bool = False
    ) -> AbstractAsyncContextManager[None]:
        """Sends the request; its chunks go to the sink, on the loop. Raises RequestError, here or on entering, for bad input.
        Leaving aborts what still runs. `before_ready` is for the warm-up request."""
        if not before_ready and self.status != "ready":
            raise self._closed()
        tokenizer = self._tokenizer if req.prompts is None and req.pairs is None else self.tokenizer
        bos_token_id = None if self._tokenizer is None else self._tokenizer.bos_token_id
        return self._generation.stream(req, sink, tokenizer, self.limits, bos_token_id)

    def generate(self, req: GenerateReqInput, *, before_ready: bool = False) -> AsyncGenerator[GenerationChunk, None]:
        """The chunks of all sequences as they come, for a reader on the loop: see `pulled`."""
        return pulled(functools.partial(self.stream, before_ready=before_ready), req)

    def _closed(self) -> RequestError:
        reasons = {
            "starting": "The server is starting.",
            "draining": "The server is shutting down.",
            "failed": f"The server has failed: {self.failure}",
            "restarting": "The server's replicas are being started again.",
        }
        return _unavailable(reasons[self.status])

    @property
    def sessions(self) -> Sessions:
        return self._generation.sessions

    def abort_unsent(self, rid_prefix: str) -> None:
        """The part of an abort that no worker can do: requests that are still being tokenized."""
        self._generation.abort_unsent(rid_prefix)

    # --- control

    async def control(self, request: ControlStruct) -> list[Any]:
        """The replies of all workers that handle it. Raises RequestError if one refuses or fails."""
        if self.status in ("starting", "failed"):
            raise self._closed()
        return await self._controls.ask(request)

    async def abort_all(self) -> None:
        await self.control(AbortRequest(abort_all=True))

    async def health_check(self, timeout_s: float) -> bool:
        """Whether all replicas that serve showed a sign of life within `timeout_s`."""
        return await is_alive(self, self._link.heartbeats_s, timeout_s)

    # --- text

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of a conversation; RequestError if the template cannot render it, or it is far too long. From any thread."""
        tokenizer = self.tokenizer
        if not tokenizer.hf.chat_template:
            self.limits.check_generates()
        try:
            text = tokenizer.render_chat(messages, tools, add_generation_prompt, continue_final_message, **kwargs)
        except ValueError as error:
            raise RequestError(str(error), param="messages") from error
        # The template has written the special tokens.
        return encode_prompt(tokenizer, text, self.limits, add_special_tokens=False)


def _unavailable(message: str) -> RequestError:
    return RequestError(message, status_code=503, err_type="ServiceUnavailableError")
