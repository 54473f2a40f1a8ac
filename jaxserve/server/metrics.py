"""ServerMetrics: what /metrics shows. The main process counts requests and replies; workers are asked for what they count.

    Timelines.observe, TokenGaps, the HTTP middleware ──► registry ──┐
    workers ◄── get_metrics ──► their snapshots, the newest of each ──┴──► Prometheus' text

A scrape waits for workers no longer than SCRAPE_WAIT_S. One that is busy with a step, or gone, is shown as it was last seen,
and `snapshot_age_seconds` says how long ago that was.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import time
from collections.abc import Awaitable, Callable, Mapping

import numpy as np

from jaxserve.config import METRIC_BUCKETS, ServerArgs
from jaxserve.messages import FRONT, SCHEDULER, TOKENIZER, WorkerAddress
from jaxserve.metrics import OTHER, Registry, Snapshot, count_process, merged
from jaxserve.scheduler.control.get_metrics import GetMetricsReqOutput
from jaxserve.server.live_requests import GapBuffer
from jaxserve.server.requests import RequestError
from jaxserve.server.timelines import durations
from jaxserve.timeline import RequestTimeline

SCRAPE_WAIT_S = 0.8

Labels = tuple[str, ...]
Gauges = Mapping[str, float | Mapping[Labels, float]]  # one value, or one for each combination of labels
# Asks all workers, and tells of each answer as it comes.
AskWorkers = Callable[[Callable[[WorkerAddress, GetMetricsReqOutput], None]], Awaitable[None]]

# The labels that the HTTP request being answered brought in its header. It goes with the task that answers it.
header_labels: contextvars.ContextVar[Labels | None] = contextvars.ContextVar("header_labels", default=None)

_MOST_CUSTOM = 128  # combinations of custom labels; further ones count as `other`
_MOST_LABEL_CHARS = 128
_GAPS_TOGETHER = 1024
# Of the server, what schedulers say of themselves. Who reads one series of each server (an endpoint picker, an autoscaler)
# would otherwise see the first replica alone.
_OF_ALL_REPLICAS = {
    "server_running_reqs": "num_running_reqs",
    "server_queue_reqs": "num_queue_reqs",
    "server_token_usage": "token_usage",
    "server_num_pages": "num_pages",
}
_MEANS = ("server_token_usage",)
_STAGES = {
    "tokenize": "tokenize",
    "dispatch": "dispatch",
    "grammar_wait": "grammar_wait",
    "queue_time": "queue",
    "prefill": "prefill",
    "decode": "decode",
    "return": "return",
}


class CustomLabels:
    """The labels that requests may bring. However many values clients think up, there are only so many combinations."""

    def __init__(self, names: Labels) -> None:
        self.names = names
        self.none: Labels = ("",) * len(names)
        self._known: set[Labels] = {self.none}

    def of(self, given: object) -> Labels:
        """`given`: an object with labels among its keys. What is not allowed, or no text, is left out."""
        if not self.names or not isinstance(given, Mapping):
            return self.none
        labels = tuple(_text(given.get(name)) for name in self.names)
        if labels not in self._known:
            if len(self._known) >= _MOST_CUSTOM:
                return (OTHER,) * len(labels)
            self._known.add(labels)
        return labels

    def of_header(self, value: str) -> Labels:
        try:
            return self.of(json.loads(value)) if self.names else self.none
        except (ValueError, RecursionError):
            return self.none


def _rank_labels(worker: WorkerAddress) -> dict[str, str]:
    """`dp_rank` names a replica: a worker that is none, and not the first of its kind, has a label of its own."""
    if worker.kind == SCHEDULER or not worker.rank:
        return {"dp_rank": str(worker.rank)}
    return {"dp_rank": "0", f"{worker.kind}_rank": str(worker.rank)}


def _without_labels(snapshot: Snapshot) -> dict[str, float]:
    """Values of families that have one series."""
    return {family.name: family.series[0].value for family in snapshot.families if not family.labels and family.series}


def _text(value: object) -> str:
    return value[:_MOST_LABEL_CHARS].encode(errors="replace").decode() if isinstance(value, str) else ""


class TokenGaps:
    """Seconds between the tokens of requests, kept until they are many: then looking at each costs little."""

    def __init__(self, take: Callable[[np.ndarray, np.ndarray, Labels], None]) -> None:
        """`take` is given seconds, how many times each came, and labels."""
        self._take = take
        self._buffers: dict[Labels, GapBuffer] = {}

    def buffer(self, labels: Labels) -> GapBuffer:
        """For a request with these labels."""
        return self._buffers.setdefault(labels, GapBuffer())

    def settle(self, least: int = _GAPS_TOGETHER) -> None:
        for labels, gaps in self._buffers.items():
            if len(gaps.seconds) >= least:
                self._take(np.array(gaps.seconds), np.array(gaps.times), labels)
                gaps.seconds.clear()
                gaps.times.clear()


class ServerMetrics:
    def __init__(self, args: ServerArgs, ask_workers: AskWorkers) -> None:
        self.custom_labels = CustomLabels(args.tokenizer_metrics_allowed_custom_labels or ())
        buckets = {METRIC_BUCKETS[name]: value for name in METRIC_BUCKETS if (value := getattr(args, name)) is not None}
        self.registry = Registry("main", buckets, self.custom_labels.names)
        self.startup_s = 0.0
        self._labels = {"model_name": args.effective_served_model_name, **json.loads(args.extra_metric_labels or "{}")}
        self._ask_workers = ask_workers
        self._asking: asyncio.Task[None] | None = None
        self._snapshots: dict[WorkerAddress, Snapshot] = {}
        of = self.registry
        self._requests, self._aborted = of.counter("num_requests_total"), of.counter("num_aborted_requests_total")
        self._failed, self._constrained = of.counter("num_failed_requests_total"), of.counter("num_so_requests_total")
        self._restarts = of.counter("replica_restarts_total")
        for rank in range(args.dp_size):
            self._restarts.inc(0, (str(rank),))  # shown before there are any
        self._prompt, self._generated = of.counter("prompt_tokens_total"), of.counter("generation_tokens_total")
        self._cached = of.counter("cached_tokens_total")
        self._first_token, self._e2e = of.histogram("time_to_first_token_seconds"), of.histogram("e2e_request_latency_seconds")
        self._per_token = of.histogram("request_time_per_output_token_seconds")
        self._queue, self._stages = of.histogram("queue_time_seconds"), of.histogram("per_stage_req_latency_seconds")
        self._prompts, self._outputs = of.histogram("prompt_tokens_histogram"), of.histogram("generation_tokens_histogram")
        self._uncached = of.histogram("uncached_prompt_tokens_histogram")
        self.token_gaps = TokenGaps(of.histogram("inter_token_latency_seconds").observe_many)

    # --- what happens

    def replica_restarted(self, rank: int) -> None:
        self._restarts.inc(1, (str(rank),))

    def worker_gone(self, worker: WorkerAddress) -> None:
        """Its last numbers are those of nobody."""
        self._snapshots.pop(worker, None)

    def observe(self, timeline: RequestTimeline) -> None:
        """A sequence has ended."""
        labels = timeline.labels or self.custom_labels.none
        self._requests.inc(1, labels)
        if timeline.is_constrained:
            self._constrained.inc(1, labels)
        if timeline.finish == "abort":
            self._aborted.inc(1, labels)
            if timeline.status_code is not None:
                self._failed.inc(1, (str(timeline.status_code), *labels))
        self._count_tokens(timeline, labels)
        self._take_times(timeline, labels)

    def _count_tokens(self, timeline: RequestTimeline, labels: Labels) -> None:
        times = timeline.scheduler
        if times is None or not times.first_scheduled_s:
            return  # nothing was computed
        prompt, cached, generated = timeline.prompt_tokens, timeline.cached_tokens, timeline.completion_tokens
        self._prompt.inc(prompt, labels)
        self._generated.inc(generated, labels)
        self._cached.inc(cached, ("device", *labels))
        self._prompts.observe(prompt, labels)
        self._uncached.observe(prompt - cached, labels)
        self._outputs.observe(generated, labels)

    def _take_times(self, timeline: RequestTimeline, labels: Labels) -> None:
        """Of requests that were served. What was aborted or refused would make latencies look better than they are."""
        took = durations(timeline)
        for name, stage in _STAGES.items():
            if name in took:
                self._stages.observe(took[name], (stage,))
        if "queue_time" in took:
            self._queue.observe(took["queue_time"], labels)
        if timeline.first_text_s:
            first_s = (
                timeline.first_text_s if timeline.is_stream else took.get("first_token_latency", 0.0) + timeline.received_s
            )
            self._first_token.observe(max(0.0, first_s - timeline.received_s), labels)
        if timeline.finish != "abort":
            self._e2e.observe(took["e2e_latency"], labels)
            if timeline.completion_tokens > 1 and "decode" in took:
                self._per_token.observe(took["decode"] / (timeline.completion_tokens - 1), labels)

    # --- scrapes

    async def scrape(self, accept: str, gauges: Gauges) -> tuple[bytes, str]:
        """Prometheus' text and its content type. `gauges`: of the main process, as they are now."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait({self._asking}, timeout=SCRAPE_WAIT_S)
        # Here and not above: workers are started behind this module's import, and need not wait for prometheus_client.
        from jaxserve.metrics.exposition import Labelled, render

        gauges = {**gauges, **self._of_all_replicas()}
        of_fronts = [snapshot for worker, snapshot in self._snapshots.items() if worker.kind == FRONT]
        # Of a request it makes no difference which of them served it.
        parts = [Labelled(merged([self.snapshot(TOKENIZER, gauges), *of_fronts]), self._labels)]
        for worker, snapshot in sorted(self._snapshots.items()):
            if worker.kind != FRONT:
                parts.append(Labelled(snapshot, {**self._labels, "engine_type": "unified", **_rank_labels(worker)}))
        return await asyncio.to_thread(render, parts, accept)

    def _of_all_replicas(self) -> Gauges:
        replicas = [_without_labels(snapshot) for worker, snapshot in self._snapshots.items() if worker.kind == SCHEDULER]
        sums = {name: sum(replica[of] for replica in replicas) for name, of in _OF_ALL_REPLICAS.items()}
        return {name: total / max(1, len(replicas)) if name in _MEANS else total for name, total in sums.items()}

    def snapshot(self, process: str, gauges: Gauges) -> Snapshot:
        """What this process has counted. `process`: what it is."""
        now_s = time.time()
        self.token_gaps.settle(1)
        for name, value in gauges.items():
            for labels, one in value.items() if isinstance(value, Mapping) else [((), value)]:
                self.registry.gauge(name).set(one, labels)
        self.registry.gauge("startup_time_seconds").set(self.startup_s)
        ages = self.registry.gauge("snapshot_age_seconds")
        for worker, snapshot in self._snapshots.items():
            component, replica = (worker.kind, worker.rank) if worker.kind == SCHEDULER else (str(worker), 0)
            ages.set(max(0.0, now_s - snapshot.taken_s), (component, str(replica)))
        count_process(self.registry, process)
        return self.registry.snapshot(now_s)

    async def _ask(self) -> None:
        with contextlib.suppress(RequestError):  # the last numbers stand
            await self._ask_workers(self._take)

    def _take(self, worker: WorkerAddress, answer: GetMetricsReqOutput) -> None:
        # Of a worker that was there before its numbers are over.
        self._snapshots = {other: kept for other, kept in self._snapshots.items() if other[:2] != worker[:2]}
        self._snapshots[worker] = answer.snapshot

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
