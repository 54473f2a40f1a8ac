"""Scheduler: owns the queues and the cache, and turns messages into steps and results into messages.

    handle(message)      requests into the waiting queue, aborts, control requests (`scheduler.control`)
    next_batch()         who takes part in the next step: prefill or decode, see `turns`
    launch(batch)        starts it; never waits
    process_results()    waits for launched steps, in order, and sends what they produced

Who calls these in which order is `loop`'s business. It works against the Runner protocol with NumPy only: no JAX, no sockets,
and of the tokenizer only `decode` for stop strings. Each request it was given gets exactly one terminal message. A message that
cannot be handled is answered or logged and leaves everything else alone; a step that fails ends the process.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from jaxserve.config import ServerArgs
from jaxserve.dispatcher import Dispatcher
from jaxserve.logit_processors import ProcessorHost
from jaxserve.messages import (
    SCHEDULER,
    AbortReq,
    BatchTokenizedGenerateReqInput,
    ControlRequest,
    DetokenizerInput,
    Message,
    ShutdownReq,
    TokenizedGenerateReqInput,
    TokenizerInput,
    WorkerAddress,
    WorkerProgress,
)
from jaxserve.metrics import Snapshot
from jaxserve.runner import Runner
from jaxserve.scheduler.adapters import Adapters
from jaxserve.scheduler.batch import NEEDS_RESULTS, NeedsResults, ScheduleBatch, StepBuilder
from jaxserve.scheduler.changeable import changeable
from jaxserve.scheduler.commands import RunnerCommands
from jaxserve.scheduler.constraints import Constraints
from jaxserve.scheduler.control.desk import ControlDesk
from jaxserve.scheduler.decode import DecodeMemory, RunningBatch
from jaxserve.scheduler.grammar_queue import POLL_INTERVAL_S, Compiler, GrammarQueue
from jaxserve.scheduler.in_flight import InFlight
from jaxserve.scheduler.intake import Intake
from jaxserve.scheduler.jumps import Jumps
from jaxserve.scheduler.make_cache import make_cache
from jaxserve.scheduler.meter import Meter
from jaxserve.scheduler.micro_batches import micro_batches_for
from jaxserve.scheduler.outputs import OutputSender
from jaxserve.scheduler.pace import Pace, PauseMode
from jaxserve.scheduler.policy import SchedulePolicy
from jaxserve.scheduler.prefill import PrefillPlanner, prefill_limits
from jaxserve.scheduler.processors import Processors
from jaxserve.scheduler.profiler import Profiler
from jaxserve.scheduler.req import Req, RequestState
from jaxserve.scheduler.requests import UNAVAILABLE, Requests
from jaxserve.scheduler.residents import Residents
from jaxserve.scheduler.results import ResultProcessor
from jaxserve.scheduler.rows import RowTable
from jaxserve.scheduler.stages import StageClock
from jaxserve.scheduler.step_log import Load, StepLog
from jaxserve.scheduler.stops import StopTextDecoder
from jaxserve.scheduler.time_limits import TIMER_INTERVAL_S, TimeLimits
from jaxserve.scheduler.token_ratio import NewTokenRatio
from jaxserve.scheduler.turns import Turns
from jaxserve.scheduler.waiting import WaitingQueue
from jaxserve.types import FinishReason

logger = logging.getLogger(__name__)


class OutputSink(Protocol):
    def send_output(self, message: DetokenizerInput) -> None: ...

    def send_reply(self, message: TokenizerInput) -> None: ...


class Scheduler:
    def __init__(
        self,
        args: ServerArgs,
        runner: Runner,
        *,
        decoder: StopTextDecoder | None,
        sink: OutputSink,
        grammars: Compiler | None = None,
        processors: ProcessorHost | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        address: WorkerAddress = WorkerAddress(SCHEDULER),
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`decoder`, `grammars` and `processors` may be None: then requests with stop strings, with a grammar, or with code are
        refused. `clock` is for time-outs and rates, `wall_clock` for the Unix times in replies. `wake` is called, in any
        thread, when a control request that waits may go on before `wait_s` is over."""
        spec = runner.spec
        self.args = args
        self._runner = runner
        self.clock = clock
        self.pace = Pace(clock)
        self._wall_clock = wall_clock
        self._limits = prefill_limits(args, spec)
        by_urgency = args.enable_priority_scheduling or args.schedule_policy == "priority"
        self.stages = StageClock(runner.annotate, counts=args.enable_metrics)
        self.meter = Meter(self.stages, is_on=args.enable_metrics)
        windows = [group.window for group in spec.kv_groups]
        self.cache = make_cache(args, spec, functools.partial(self.meter.evicted, windows))
        self._table = RowTable(
            max_rows=spec.max_rows,
            context_len=spec.context_len,
            default_stream_interval=args.stream_interval,
            num_draft_tokens=spec.num_draft_tokens,
            thinks_ahead=not args.disable_radix_cache,
        )
        self._compiling = GrammarQueue(grammars)
        self._waiting = WaitingQueue(max_len=args.max_queued_requests, evicts_by_priority=by_urgency)
        self.adapters = Adapters(args, runner, self._waiting)
        self._residents = Residents(self.cache, self._table, self.adapters.slots, wall_clock)
        self._running = RunningBatch(self._table, micro_batches_for(args, spec, self._table))
        self._ratio = NewTokenRatio(args.schedule_conservativeness, spec.num_stages)
        self._turns = Turns(args.prefill_decode_interval)
        self._intake = Intake(args, spec, self.adapters, decoder=decoder, clock=clock, wall_clock=wall_clock)
        self._outputs = OutputSender(
            self._table, sink.send_output, wall_clock, args.weight_version, spec.num_draft_tokens, address
        )
        self._log = StepLog(args.decode_log_interval, self.load, clock)
        self._requests = Requests(
            self._intake,
            self.adapters,
            self._compiling,
            self._waiting,
            self._residents,
            self._outputs,
            self._log.counters,
            wall_clock,
            self.meter,
        )
        self.input_gate = self._requests.gate
        self._jumps = Jumps(
            self._table,
            self._residents,
            self._waiting,
            self._running,
            self._requests.finish,
            is_on=not args.disable_jump_forward and not args.disable_radix_cache,
            mixes=args.enable_mixed_chunk,
            num_stages=spec.num_stages,
        )
        constraints = Constraints(self._table, spec, self._jumps)
        self._results = ResultProcessor(
            spec=spec,
            table=self._table,
            residents=self._residents,
            outputs=self._outputs,
            constraints=constraints,
            jumps=self._jumps,
            finish=self._requests.finish,
            wall_clock=wall_clock,
        )
        changes_logits = None if processors is None else Processors(processors, runner, self._table, self._requests.finish)
        builder = StepBuilder(self._table, spec.num_draft_tokens, spec.vectors)
        self.profiler = Profiler(runner, self.pace, self.stages, self.process_results, sink.send_output, address)
        self._in_flight = InFlight(runner, builder, constraints, changes_logits, self._results, self.meter)
        self._memory = DecodeMemory(
            cache=self.cache,
            table=self._table,
            residents=self._residents,
            waiting=self._waiting,
            running=self._running,
            ratio=self._ratio,
            retraction_policy=args.retraction_policy,
            num_draft_tokens=spec.num_draft_tokens,
        )
        self._prefill = PrefillPlanner(
            args=args,
            limits=self._limits,
            cache=self.cache,
            table=self._table,
            residents=self._residents,
            waiting=self._waiting,
            adapters=self.adapters,
            policy=SchedulePolicy(
                args.schedule_policy, self.cache, by_urgency=by_urgency, rng=np.random.default_rng(args.random_seed)
            ),
            running=self._running,
            memory=self._memory,
            ratio=self._ratio,
        )
        self._time_limits = TimeLimits(self._requests.live, clock)
        self.address, self._send_reply = address, sink.send_reply
        self._programs_missing = 0  # as the main process knows it
        self._decode_lacks_pages = False  # what the results free is for those that run, before anybody is admitted
        self.commands = RunnerCommands(
            runner,
            self.pace,
            self._requests,
            self._waiting,
            self._residents,
            self.cache.flush,
            lambda: self.num_in_flight,
            wake,
        )
        self._control = ControlDesk(self, address, sink.send_reply)
        self._dispatch = Dispatcher(
            {
                TokenizedGenerateReqInput: self._requests.add,
                BatchTokenizedGenerateReqInput: self._requests.add_batch,
                AbortReq: self._on_abort,
                ControlRequest: self._control.receive,
                ShutdownReq: self._on_shutdown,
            }
        )

    # --- state

    @property
    def is_idle(self) -> bool:
        """Nothing to do until a message comes."""
        holds_nothing = self._holds_nothing and not self.adapters.memory.is_busy
        return not self._in_flight and not self._control and (holds_nothing or self.pace.is_paused)

    @property
    def _holds_nothing(self) -> bool:
        return not self._in_flight and not self._requests.live and not len(self._residents)

    @property
    def is_drained(self) -> bool:
        """Shutdown was asked for and all is answered."""
        return self._requests.is_closed and self._holds_nothing and not self._control

    @property
    def wait_s(self) -> float | None:
        """How long nothing is to be done unless a message comes; None: for ever."""
        if self.is_idle:
            return TIMER_INTERVAL_S if self._programs_missing else None
        if self._in_flight:
            return 0.0
        if len(self._compiling) + self.adapters.num_held_reqs == len(self._requests.live):
            return POLL_INTERVAL_S
        looks_only = self._holds_nothing or self.pace.is_stopped  # at control requests that wait, now and then
        return TIMER_INTERVAL_S if looks_only else min(self.pace.wait_s, TIMER_INTERVAL_S)

    @property
    def num_stages(self) -> int:
        """So many steps the runner computes at a time."""
        return self._runner.spec.num_stages

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def load(self) -> Load:
        return Load(
            num_running=len(self._residents),
            num_waiting=len(self._waiting),
            pending_tokens=self._waiting.pending_tokens,
            pools=self.cache.pool_usage(),
            avg_accept_len=self._results.avg_accept_len,
        )

    def internal_state(self) -> dict[str, Any]:
        load, spec = self.load(), self._runner.spec
        return {
            "dp_rank": self.address.rank,
            **load.counts(),
            **self.cache.counts(),
            "new_token_ratio": self._ratio.value,
            "num_retracted_reqs": self._waiting.num_begun,
            "num_paused_reqs": load.num_running + load.num_waiting if self.pace.is_paused else 0,
            "num_preemptions": self._prefill.num_preempted,
            "num_jumps": self._jumps.num_jumps,
            "spec_num_draft_tokens": spec.num_draft_tokens,
            "decode_sum_seq_lens": int(self._table.kv_len[self._table.alive].sum()),
            "max_total_num_tokens": spec.max_total_tokens,
            "max_running_requests": self._limits.max_running,
            "context_len": spec.context_len,
            "page_size": spec.page_size,
            "prefill_step_tokens": self._limits.step_tokens,
            "released_memory": list(self.commands.released),
            "profile": self.profiler.folder,
            **self.pace.counts(),
            **self.input_gate.counts(),
            **self.adapters.counts(),
            **self._compiling.counts(),
            **self._memory.counts(),
            **self._results.counts(),
            **self._log.counts(),
            **changeable(self.args),
            "runner": self._runner.internal_state(),
        }

    def metrics_snapshot(self) -> Snapshot:
        return self.meter.snapshot(self.internal_state())

    # --- messages

    def handle(self, message: Message) -> None:
        try:
            self._dispatch(message)
        except Exception:
            logger.exception("A message of type %s could not be handled.", type(message).__name__)
        self._outputs.flush()

    def _on_abort(self, message: AbortReq) -> None:
        self._requests.abort(message.rids)

    def _on_shutdown(self, message: ShutdownReq) -> None:
        self._requests.close()
        self.resume()  # what is still held is to be finished

    # --- what control requests do

    def abort(self, rid_prefix: str) -> None:
        """Ends every request whose rid begins so."""
        self._requests.abort_prefix(rid_prefix)
        self._outputs.flush()

    def release_input(self) -> None:
        """All replicas know that input is unblocked: what was held goes on."""
        self._requests.release_held()
        self._outputs.flush()

    def flush_cache(self) -> bool:
        """Whether nothing used the cache, so that it is empty now. Requests that a pause keeps waiting do not use it."""
        if not self._requests.live:
            self.process_results()  # of steps that only requests which have ended took part in
        is_unused = not self._in_flight and not len(self._residents) and (self.pace.is_paused or not len(self._waiting))
        return is_unused and self.cache.flush()

    def pause(self, mode: PauseMode) -> None:
        """After this no step is in flight, and none is launched until `resume`."""
        self.process_results()
        self._send_all()
        if mode == "abort":
            self.abort("")
        elif mode == "retract":
            self._memory.retract(self._residents.live)
        self.pace.pause()

    def _send_all(self) -> None:
        """Tokens that were to wait for more of them."""
        self._outputs.publish_unsent(np.array([req.row for req in self._residents.live], np.int32))

    def resume(self) -> bool:
        """Whether there was a pause. Its time does not count for the time-outs of requests."""
        paused_since_s = self.pace.resume()
        if paused_since_s is None:
            return False
        self._time_limits.leave_out(paused_since_s)
        return True

    def set_args(self, args: ServerArgs) -> None:
        """Options as control requests may change them."""
        self.args = args
        if args.weight_version != self._outputs.weight_version:
            self._send_all()  # a message has tokens of one version
            self._outputs.weight_version = args.weight_version
        self._waiting.max_len = args.max_queued_requests
        self._log.decode_log_interval = args.decode_log_interval

    # --- steps

    def next_batch(self) -> ScheduleBatch | NeedsResults | None:
        """Who takes part in the next step. Rows and pages are taken: a batch returned must be launched.

        Planning ends no request whose step is in flight and waits for none: where it would have to, it says NeedsResults.
        """
        if self.pace.is_stopped:
            self._requests.refuse_beyond_limit(self._prefill.deferred)
        if not self.pace.may_launch:
            return None
        if len(self._jumps):
            self._log.counters.generated_tokens += self._jumps.carry_out()
            self._outputs.flush()
        self._running.refresh()
        batch: ScheduleBatch | NeedsResults | None = None
        decode_lacks_pages, self._decode_lacks_pages = self._decode_lacks_pages, False
        if self._turns.prefill_may_run(len(self._running.due_rows)) and not (decode_lacks_pages and len(self._running)):
            batch = self._prefill.plan(is_settled=not self._in_flight)
            if batch is NEEDS_RESULTS:
                return batch
            self._requests.refuse_beyond_limit(self._prefill.deferred)
        if batch is None and len(self._running.next_rows):
            batch = self._plan_decode()
        if batch is None and not self._in_flight and not len(self._running):
            self._end_stuck_request()
        return batch

    def launch(self, batch: ScheduleBatch) -> None:
        """Its forward pass, and its sampling too unless that must wait for `finish_launch`."""
        with self.profiler.launching(batch):
            step = self._in_flight.launch(batch, self.cache.drain_page_updates(), self.adapters.slots.take_loads())
        self.pace.launched()
        self._residents.launched(batch.rows)
        self._table.kv_len[batch.rows] = step.seq_lens
        if batch.items:
            self._book_prefill(batch)
        self._running.launched(batch)
        if len(batch.decode_rows):
            self._ratio.after_decode()
            self._turns.after_decode()
            self._prefill.after_decode()
        self._log.launched(batch)

    def finish_launch(self) -> None:
        """Samples the step launched last, if it waits for masks, for which `process_results` comes first."""
        self._in_flight.finish_launch()
        self._outputs.flush()

    def process_results(self, keep: int = 0) -> None:
        """Takes in the results of launched steps, oldest first, until `keep` are left in flight; more, if the masks of the step
        launched last depend on them. Waits for them."""
        self._log.counters.generated_tokens += self._in_flight.take_in(keep)

    def _plan_decode(self) -> ScheduleBatch | NeedsResults | None:
        while len(self._running.next_rows) and not self._memory.grow():
            if self._in_flight:
                self._decode_lacks_pages = True
                return NEEDS_RESULTS
            if (last := self._memory.make_room()) is not None:
                self._make_last_room(last)
        return ScheduleBatch(decode_rows=self._running.next_rows) if len(self._running.next_rows) else None

    def _make_last_room(self, last: Req) -> None:
        """A running request that is left alone in its shard lacks a page. A chunked request there gives way; else it ends."""
        shard = self.cache.of(last.row)
        if rivals := [req for req in self._prefill.chunked_reqs if self.cache.of(req.row) is shard]:
            self._memory.retract(rivals)
            return
        self._end(
            last, FinishReason.abort("The KV cache is full even with all other requests retracted.", 500, "OutOfMemoryError")
        )
        self._running.refresh()
        self._outputs.flush()

    def _book_prefill(self, batch: ScheduleBatch) -> None:
        """What launching a prefill step changes at once: prompts are shared, complete ones go on to decode."""
        complete: list[int] = []
        now = self._wall_clock()
        for item in batch.items:
            req = item.req
            assert req.lease is not None
            self.cache.commit(req.lease, self._table.tokens[item.row, : item.end])
            req.times.chunk_launched(now, item.end - item.start)
            if not req.times.first_scheduled_s:
                req.times.first_scheduled_s = now
                req.running_since_s = self.clock()
            if item.is_last:
                req.move_to(RequestState.DECODE)
                complete.append(item.row)
        self._running.join(complete)
        self._turns.after_prefill(has_decode_rows=len(batch.decode_rows) > 0)

    def _end_stuck_request(self) -> None:
        """Nothing runs and nothing could be scheduled: whoever is first in line can never be served. Intake refuses such
        requests, so this is a bug; one clear answer is better than a server that hangs."""
        first = next(iter([*self._prefill.chunked_reqs, *self._waiting.admissible(1)]), None)
        if first is None or self.adapters.memory.awaits_reading:
            return
        logger.error("Request %s cannot be scheduled although nothing else runs (%s).", first.rid, self.load())
        self._end(first, FinishReason.abort("The request could not be scheduled.", 500, "InternalServerError"))
        self._outputs.flush()

    def _end(self, req: Req, reason: FinishReason) -> None:
        self._requests.end([req], reason)

    # --- timers and idleness

    def check_timers(self) -> None:
        """Time-outs of requests, adapters, and control requests that wait; cheap, meant for every round of the loop."""
        self._control.serve()
        self.profiler.tend()
        self.tend_runner()
        if len(self._compiling):
            self._requests.collect_compiled()
            self._outputs.flush()
        if (unreadable := self.adapters.memory.tend()) is not None:
            self._requests.end(unreadable.reqs, FinishReason.abort(unreadable.message, 400, "BadRequestError"))
            self._outputs.flush()
        if self.pace.is_paused:
            return
        for late, message in self._time_limits.overdue(self.args):
            self._requests.end(late, FinishReason.abort(message, 503, UNAVAILABLE))
            self._outputs.flush()

    def tend_runner(self) -> None:
        """Takes in programs that were compiled meanwhile, and says so."""
        missing = self._runner.tend()
        if missing != self._programs_missing:
            self._programs_missing = missing
            self._send_reply(WorkerProgress(worker=self.address, programs_missing=missing))

    def on_idle(self) -> None:
        """Once after all requests are done: resets what adapts to load and compares the cache's books."""
        if not self._holds_nothing:  # paused
            return
        self._ratio.reset()
        self._log.idle()
        report = self.cache.check()
        if not report.is_clean:
            logger.error("%s. Repaired; serving goes on.", report.describe())
            self._log.counters.num_leaks_repaired += 1
            self.cache.repair(report)
