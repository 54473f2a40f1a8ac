"""The scheduler process: builds the runner, says it is ready, and runs the scheduler's loop over its channels.

The only process of a server that imports JAX. While the model loads and compiles, a thread gets the decoder, which the
scheduler needs for stop strings alone. A step that hangs ends the process through the watchdog, with every thread's stack on
stderr.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import faulthandler
import logging
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.config import ServerArgs
from jaxserve.grammar import GrammarCompiler, JsonStyle
from jaxserve.hosts import BroadcastRunner
from jaxserve.ipc import Inbox, Outbox
from jaxserve.logit_processors import ProcessorHost
from jaxserve.logit_processors.base import load_dill
from jaxserve.messages import (
    DETOKENIZER,
    SCHEDULER,
    TOKENIZER,
    BatchTokenIDOut,
    DetokenizerInput,
    Message,
    SchedulerInput,
    ShutdownReq,
    TokenizerInput,
    WorkerAddress,
    WorkerReady,
)
from jaxserve.runner import Runner, RunnerSpec
from jaxserve.scheduler.loop import SchedulerLoop
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.stops import StopTextDecoder
from jaxserve.scheduler.watchdog import Watchdog
from jaxserve.server.decoder_handover import make_decoder, wait_for_tokenizer_json
from jaxserve.server.garbage import importing, settle_garbage_collector
from jaxserve.server.kv_events import KVEventPublisher
from jaxserve.server.tokenizer import TextDecoder
from jaxserve.server.worker_process import UserError, WorkerContext, exit_now, run_worker

logger = logging.getLogger(__name__)

# A wait without end would still have to look for signals now and then.
_LONGEST_WAIT_S = 60.0
_MAIN = WorkerAddress(TOKENIZER)


class ChannelTransport:
    """The scheduler's Transport over its channels."""

    def __init__(self, inbox: Inbox, to_detokenizers: Sequence[Outbox], to_tokenizer: Outbox) -> None:
        """`to_detokenizers`: by rank."""
        self._inbox = inbox
        self._to_detokenizers = to_detokenizers
        self._to_tokenizer = to_tokenizer

    def recv_messages(self, timeout_s: float | None) -> Sequence[Message]:
        messages = self._inbox.receive()
        while not messages and timeout_s != 0:
            arrived = self._inbox.wait(_LONGEST_WAIT_S if timeout_s is None else timeout_s)
            messages = self._inbox.receive()
            if not arrived and timeout_s is not None:
                break
        return messages

    def wake(self) -> None:
        """Whoever waits for messages need not do so any longer. In any thread."""
        self._inbox.wake()

    def send_output(self, message: DetokenizerInput) -> None:
        if isinstance(message, BatchTokenIDOut):
            self._to_detokenizers[message.route.detokenizer].send(message)
        elif isinstance(message, ShutdownReq):
            for outbox in self._to_detokenizers:
                outbox.send(message)
        else:
            self._to_detokenizers[0].send(message)  # which passes it on: see `host_spans`

    def send_reply(self, message: TokenizerInput) -> None:
        self._to_tokenizer.send(message)


class TailDecoder:
    """The decoder as the scheduler sees it. Special tokens are text here: a stop string may name one."""

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder

    def decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode_batch([token_ids], skip_special_tokens=False)[0]


def work(context: WorkerContext) -> None:
    if context.args.enable_custom_logit_processor:
        try:
            load_dill()
        except ImportError as error:
            raise UserError(str(error)) from error
    publisher = open_publisher(context)
    # Here and not above: signals and the parent's death are taken care of before the seconds that importing JAX takes.
    with importing() if context.guest is None else contextlib.nullcontext():
        from jaxserve.executor.own_settings import own_settings
        from jaxserve.server.building import build, user_errors
        from jaxserve.server.hosts import leading

    args = context.args

    with (
        leading(args, os.environ, context.give_up) as leader,
        concurrent.futures.ThreadPoolExecutor(1, "tokenizer") as pool,
    ):
        waiting = pool.submit(wait_for_tokenizer_json, context)
        built = build(context)
        with user_errors():
            tokenizer_json = waiting.result()
            decoder = TailDecoder(make_decoder(tokenizer_json, args, hide_torch=context.guest is None))
        runner: Runner = built.runner
        if leader is not None:
            leader.wait_joined()
            runner = BroadcastRunner(runner, leader, model_path=args.model_path, load_format=args.load_format)
        if context.guest is None:
            serve(context, built.args, runner, decoder, tokenizer_json, publisher)
            return
        with own_settings():
            try:
                serve(context, built.args, runner, decoder, tokenizer_json, publisher)
            finally:  # the process goes on
                built.runner.close()


def open_publisher(context: WorkerContext) -> KVEventPublisher | None:
    """Of KV cache events, if somebody wants them. What it cannot have should be known before a model is loaded."""
    if context.args.kv_events is None:
        return None
    try:
        return KVEventPublisher(context.args.kv_events, context.address.rank)
    except ValueError as error:
        raise UserError(str(error)) from error


def serve(
    context: WorkerContext,
    args: ServerArgs,
    runner: Runner,
    decoder: StopTextDecoder | None,
    tokenizer_json: str | None = None,
    publisher: KVEventPublisher | None = None,
) -> None:
    """Until a ShutdownReq. `args` are the resolved options. The publisher is closed at the end."""
    channels = context.channels
    with contextlib.ExitStack() as closing:
        inbox = channels.inbox(context.address, SchedulerInput)
        closing.callback(inbox.close)
        outboxes = [
            channels.outbox(worker)
            for worker in (*(WorkerAddress(DETOKENIZER, rank) for rank in range(args.detokenizer_worker_num)), _MAIN)
        ]
        for outbox in outboxes:
            closing.callback(outbox.close)
        *to_detokenizers, to_tokenizer = outboxes
        transport = ChannelTransport(inbox, to_detokenizers, to_tokenizer)
        watchdog = Watchdog(
            args.watchdog_timeout,
            lambda reason: _give_up(context, reason),
            soft_timeout_s=args.soft_watchdog_timeout,
            on_soft_timeout=lambda: faulthandler.dump_traceback(all_threads=True),
        )
        grammars = _grammar_compiler(args, runner.spec, tokenizer_json) if args.follows_grammars else None
        processors = ProcessorHost(args.custom_logit_processor_timeout_s) if args.enable_custom_logit_processor else None
        if args.random_seed is not None:  # else replicas would draw the same seeds for requests that bring none
            args = args.replace(random_seed=args.random_seed + context.address.rank)
        scheduler = Scheduler(
            args,
            runner,
            decoder=decoder,
            sink=transport,
            grammars=grammars,
            processors=processors,
            address=context.address,
            wake=transport.wake,
        )
        loop = SchedulerLoop(
            scheduler,
            transport,
            overlap=not args.disable_overlap_schedule,
            sleep_on_idle=args.sleep_on_idle,
            recv_interval=args.scheduler_recv_interval,
            watchdog=watchdog,
            publish_events=None if publisher is None else publisher.publish,
        )
        try:
            _load_adapters(scheduler, args)
            scheduler.tend_runner()  # how many programs are missing is known before anybody hears "ready"
            to_tokenizer.send(WorkerReady(worker=context.address, info=_info(args, runner)))
            if context.guest is None:
                settle_garbage_collector()
            watchdog.start()
            loop.run()
        finally:
            watchdog.stop()
            if grammars is not None:
                grammars.close()
            if processors is not None:
                processors.close()
            if publisher is not None:
                publisher.close()


def _load_adapters(scheduler: Scheduler, args: ServerArgs) -> None:
    try:
        scheduler.adapters.load_initial(args.lora_paths or ())
    except ValueError as error:
        raise UserError(str(error)) from error


def _grammar_compiler(args: ServerArgs, spec: RunnerSpec, tokenizer_json: str | None) -> GrammarCompiler:
    pattern = args.constrained_json_whitespace_pattern
    style = JsonStyle(any_whitespace=not args.constrained_json_disable_any_whitespace)
    return GrammarCompiler(
        tokenizer_json,
        spec.vocab_size,
        spec.eos_token_ids,
        json_style=style if pattern is None else msgspec.structs.replace(style, whitespace_pattern=pattern),
        timeout_s=args.grammar_compile_timeout_s,
    )


def _info(args: ServerArgs, runner: Runner) -> dict[str, Any]:
    spec = runner.spec
    return {**dataclasses.asdict(spec), "max_total_tokens": spec.max_total_tokens, "resolved_args": args.public_dict()}


def _give_up(context: WorkerContext, reason: str) -> None:
    """Called by the watchdog while the loop's thread hangs, so nothing here may wait for it."""
    faulthandler.dump_traceback(all_threads=True)
    context.give_up(reason)


if __name__ == "__main__":
    exit_now(run_worker(SCHEDULER, work))
