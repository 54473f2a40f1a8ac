"""HostSpans: what a process without JAX does while a profile is taken, and how that comes into the trace.

Scheduler, detokenizers, front processes and main process are told of a profile's begin and end in the order of their work
(`ProfileBegan`, `ProfileEnded`): each tells the `next_in_chain`. The last of them puts what was noted beside the scheduler's
trace, into a file for Perfetto. Several replicas take profiles of their own, maybe at the same time.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from jaxserve.config import ServerArgs
from jaxserve.messages import DETOKENIZER, TOKENIZER, HostSpan, ProfileBegan, ProfileEnded, WorkerAddress
from jaxserve.server.output_routes import fronts_of

logger = logging.getLogger(__name__)

MERGED = "perfetto_trace.json.gz"
_MAX_SPANS = 100_000
_REST_NS = 200_000_000  # for the outputs of the last step to come through
_NOTHING = contextlib.nullcontext()
# The runner notes a Unix time in its trace: what lies between its clock and ours.
_CLOCK = re.compile(rb'"ts":([0-9.]+),"dur":[0-9.]+,"name":"clock","args":\{"unix_ns":"([0-9]+)"')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_METADATA = re.compile(rb'"metadata"\s*:\s*\{[^{}]*\}\s*,')  # Perfetto does not like it
_FIRST_PID = 1_000_001  # far from those of the trace


def next_in_chain(worker: WorkerAddress, args: ServerArgs) -> WorkerAddress:
    """Who hears of a profile from a detokenizer or a front process: all detokenizers by rank, all front processes, and then the
    main process."""
    detokenizers = [WorkerAddress(DETOKENIZER, rank) for rank in range(args.detokenizer_worker_num)]
    chain = [*detokenizers, *fronts_of(args), WorkerAddress(TOKENIZER)]
    return chain[chain.index(worker) + 1]


class HostSpans:
    def __init__(self) -> None:
        self._spans: dict[WorkerAddress, list[HostSpan]] = {}  # of the schedulers that take a profile

    def __call__(self, name: str, count: int) -> AbstractContextManager[None]:
        return self._note(name, count) if self._spans else _NOTHING

    def begin(self, message: ProfileBegan) -> None:
        self._spans[message.source] = []

    def end(self, message: ProfileEnded) -> list[HostSpan]:
        return self._spans.pop(message.source, [])

    @contextlib.contextmanager
    def _note(self, name: str, count: int) -> Iterator[None]:
        begin_ns = time.time_ns()
        yield
        span = HostSpan(name, begin_ns, time.time_ns(), count)
        for spans in self._spans.values():
            if len(spans) < _MAX_SPANS:
                spans.append(span)


def merge(folder: str, ended_ns: int, processes: Mapping[str, Sequence[HostSpan]]) -> None:
    """Writes the trace in the folder once more, with these processes in it. A failure is worth no more than a log line."""
    try:
        (file,) = Path(folder).glob("plugins/profile/*/*.trace.json.gz")
        data = _METADATA.sub(b"", gzip.decompress(file.read_bytes()), count=1)
        clock, events = _CLOCK.search(data), _EVENTS.search(data)
        if clock is None or events is None:
            return
        offset_us = float(clock[1]) - int(clock[2]) / 1e3
        added = b"".join(
            json.dumps(event).encode() + b","
            for pid, (process, spans) in enumerate(processes.items(), _FIRST_PID)
            for event in _events(pid, process, [span for span in spans if span.begin_ns < ended_ns + _REST_NS], offset_us)
        )
        merged = data[: events.end()] + added + data[events.end() :]
        unfinished = file.parent / f".{MERGED}"
        unfinished.write_bytes(gzip.compress(merged, compresslevel=1))
        unfinished.replace(file.parent / MERGED)
    except (OSError, EOFError, ValueError) as error:
        logger.info("The trace in %s is the scheduler's alone: %s", folder, error)


def _events(pid: int, process: str, spans: Sequence[HostSpan], offset_us: float) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}}
    for span in spans:
        begin_us, us = offset_us + span.begin_ns / 1e3, (span.end_ns - span.begin_ns) / 1e3
        yield {"ph": "X", "pid": pid, "tid": 1, "ts": begin_us, "dur": us, "name": span.name, "args": {"count": span.count}}
