"""One run against a server, from the first warm-up request to the record."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import numpy as np

from jaxserve.bench.record import LOAD_FIELDS, Record, header
from jaxserve.bench.serving.apis import PATHS
from jaxserve.bench.serving.ceiling import ceiling_per_process
from jaxserve.bench.serving.clients import Run, num_processes, run_clients
from jaxserve.bench.serving.metrics import detail_fields, most_at_once, most_per_s, run_fields
from jaxserve.bench.serving.options import ServingOptions
from jaxserve.bench.serving.sending import send_task, session_of
from jaxserve.bench.serving.target import Target, Timeline
from jaxserve.bench.serving.tokens import Tokens
from jaxserve.bench.serving.work import Load, Outcome, Task
from jaxserve.progress import progress_bar

_WARMUP_TOKENS = 32
# From here on the client may be part of what is measured.
_NEAR = 0.5
_LAG_MS = 10.0

Say = Callable[[str], object]


class RunError(Exception):
    """Nothing could be measured; the text is a sentence for the terminal."""


def load_of(options: ServingOptions, target: Target, model: str, server_info: Record | None, num_tasks: int) -> Load:
    return Load(
        api=options.api,
        url=target.base + PATHS[options.api],
        model=options.model or model,
        headers=options.headers,
        temperature=options.temperature,
        top_p=options.top_p,
        ignore_eos=not options.disable_ignore_eos,
        stream=not options.disable_stream,
        wants_cached=options.cache_report and options.backend.startswith("sglang-oai"),
        incremental=bool((server_info or {}).get("incremental_streaming_output")),
        extra_body=options.extra_body,
        timeout_s=options.request_timeout_s,
        num_processes=num_processes(options.client_processes, num_tasks, options.max_concurrency),
        max_concurrency=options.max_concurrency,
    )


def run_serving(options: ServingOptions, target: Target, model: str, tokens: Tokens, tasks: list[Task], say: Say) -> Record:
    """Returns the record; its `interrupted` says whether Ctrl-C cut it short. Raises RunError if it cannot begin."""
    server_info = target.server_info()
    load = load_of(options, target, model, server_info, len(tasks))
    ceiling = None
    if options.client_ceiling != "off" and load.stream:
        ceiling = load.num_processes * ceiling_per_process(load, anew=options.client_ceiling == "measure")
    timeline = Timeline(target)
    try:
        run = asyncio.run(_run(options, target, load, tasks, timeline, say))
    except asyncio.CancelledError:  # by a second Ctrl-C
        raise KeyboardInterrupt from None
    streamed, slo_ms = load.stream, options.slo_ms
    record = header("serving") | {name: getattr(options, name) for name in ("tag", *LOAD_FIELDS)}
    record |= {"model": load.model, "base_url": target.base, "interrupted": run.interrupted}
    record |= run_fields(run.outcomes, run.start_s, tokens, slo_ms, streamed=streamed)
    record["client"] = _client_field(run, ceiling)
    record["timeline"] = timeline.field(run.start_s)
    record["server_info"] = target.server_info() or server_info
    if record["accept_length"] is None:
        record["accept_length"] = _accept_len(record["server_info"])
    if options.output_details:
        record |= detail_fields(run.outcomes, run.start_s, tokens, streamed=streamed)
    return record


async def _run(options: ServingOptions, target: Target, load: Load, tasks: list[Task], timeline: Timeline, say: Say) -> Run:
    await _warm_up(load, tasks[0], options.warmup_requests, say)
    if options.flush_cache and (reason := target.flush_cache()):
        raise RunError(f"--flush-cache: the server does not empty its cache ({reason}).")
    if options.profile and (reason := target.post("/start_profile", options.profile_body())):
        raise RunError(f"--profile: the server does not start a profile ({reason}).")
    sampling = asyncio.create_task(timeline.run())
    try:
        with _interruptible() as stop, progress_bar(len(tasks), "Requests", "request", show=not options.disable_tqdm) as bar:
            return await run_clients(load, tasks, stop, bar.update)
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        if options.profile and "num_steps" not in options.profile_body():
            reason = await asyncio.to_thread(target.post, "/stop_profile", None, 600.0)
            if reason:
                say(f"The profile did not end well: {reason}")


@contextlib.contextmanager
def _interruptible() -> Iterator[asyncio.Event]:
    """An event that Ctrl-C sets; the second Ctrl-C ends everything at once."""
    loop, stop, task = asyncio.get_running_loop(), asyncio.Event(), asyncio.current_task()
    assert task is not None

    def interrupted() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _warm_up(load: Load, task: Task, num: int, say: Say) -> None:
    """Requests that do not count, all at once. Raises RunError if none goes well: then nothing else would."""
    if not num:
        return
    say(f"Warming up with {num} request{'s' if num > 1 else ''} to {load.url} ...")
    short = Task(
        turns=task.turns[:1], prompt_len=task.prompt_len, output_len=min(task.output_len, _WARMUP_TOKENS), schema=task.schema
    )
    async with session_of(load) as session:
        replies = await asyncio.gather(*(send_task(session, load, 0, short) for _ in range(num)))
    outcomes: list[Outcome] = [outcome for reply in replies for outcome in reply]
    if not any(outcome.ok for outcome in outcomes):
        first = outcomes[0]
        raise RunError(f"The warm-up request failed, so nothing was measured. {first.error_kind}: {first.error}")


def _client_field(run: Run, ceiling: float | None) -> Record:
    arrivals = [one.start_s + time_s for one in run.outcomes for time_s in one.times_s]
    return {
        "processes": len(run.reports),
        "peak_events_per_s": most_per_s(np.array(arrivals)),
        "ceiling_events_per_s": ceiling,
        "cpu_share": max(report.cpu_s / report.duration_s for report in run.reports),
        "max_lag_ms": max(report.max_lag_s for report in run.reports) * 1e3,
        "p99_lag_ms": max(report.p99_lag_s for report in run.reports) * 1e3,
        "peak_concurrency": most_at_once(run.outcomes),
    }


def client_warnings(client: Record) -> Iterator[str]:
    """Why the numbers may be the client's rather than the server's."""
    ceiling, more = client["ceiling_events_per_s"], f"; try --client-processes {client['processes'] + 1} or another machine"
    if ceiling and client["peak_events_per_s"] > _NEAR * ceiling:
        yield (
            f"The client was near its ceiling: {client['peak_events_per_s']:,.0f} events/s of {ceiling:,.0f} that "
            f"{client['processes']} process(es) can read{more}."
        )
    elif client["cpu_share"] > _NEAR:
        yield f"A client process was busy {client['cpu_share']:.0%} of the time{more}."
    if client["p99_lag_ms"] > _LAG_MS:
        cores = os.cpu_count()
        yield (
            f"The client heard of events late: 1 % of the time by more than {client['p99_lag_ms']:.0f} ms. This machine's "
            f"{cores} cores are busy; latencies include that."
        )


def _accept_len(server_info: Record | None) -> float | None:
    states = (server_info or {}).get("internal_states")
    value = (
        states[0].get("avg_spec_accept_length") if isinstance(states, list) and states and isinstance(states[0], dict) else None
    )
    return value if isinstance(value, int | float) else None
