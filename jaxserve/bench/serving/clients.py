"""Starts the client processes, gives them one start time, and gathers what they saw. The other side is `client`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from jaxserve.bench.serving.client import TICKET, Results
from jaxserve.bench.serving.work import ClientReport, Load, Outcome, Task

# Between the last process's "ready" and the first request: each has to hear when that is.
_HEAD_START_S = 0.05
# Streams that one process is thought to bear.
_STREAMS_PER_PROCESS = 64
_STOP_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True)
class Run:
    outcomes: list[Outcome]  # in the order in which they were sent
    reports: list[ClientReport]
    start_s: float  # monotonic
    interrupted: bool


class ClientError(Exception):
    """A client process died; the text is a sentence for the terminal."""


def num_processes(asked: int, num_tasks: int, max_concurrency: int | None) -> int:
    at_once = min(num_tasks, max_concurrency or num_tasks)
    if asked:
        return min(asked, at_once)
    return max(1, min(at_once // _STREAMS_PER_PROCESS, (os.cpu_count() or 1) // 2))


async def run_clients(load: Load, tasks: list[Task], stop: asyncio.Event, ended: Callable[[], object]) -> Run:
    """Sends all tasks; `ended` is called for each one that has ended. Once `stop` is set, what runs is cancelled."""
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as name:
        folder = Path(name)
        (folder / "load.json").write_bytes(msgspec.json.encode(load))
        (folder / "tasks.json").write_bytes(msgspec.json.encode(tasks))
        (folder / "tickets").write_bytes(b"".join(TICKET.pack(i) for i in range(len(tasks))))
        async with _processes(folder, load.num_processes) as processes:
            start_s = await _start(processes)
            reading = asyncio.gather(*(_read(process, ended) for process in processes))
            await _finish(processes, reading, stop)
        results = [_results(folder / f"{i}.json") for i in range(load.num_processes)]
    outcomes = sorted((one for result in results for one in result.outcomes), key=lambda one: one.start_s)
    return Run(outcomes, [result.report for result in results], start_s, stop.is_set())


@contextlib.asynccontextmanager
async def _processes(folder: Path, num: int) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    with (folder / "tickets").open("rb", buffering=0) as tickets:
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "jaxserve.bench.serving.client",
                str(folder),
                str(i),
                str(tickets.fileno()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(tickets.fileno(),),
                process_group=0,  # Ctrl-C in the terminal is for us: they hear of it from us
            )
            for i in range(num)
        ]
        try:
            yield processes
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                await process.wait()


async def _start(processes: list[asyncio.subprocess.Process]) -> float:
    for process in processes:
        assert process.stdout is not None
        if await process.stdout.readline() != b"ready\n":
            raise ClientError(f"A client process ended with {await process.wait()} before it was ready.")
    start_s = time.monotonic() + _HEAD_START_S
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{start_s!r}\n".encode())
    return start_s


async def _read(process: asyncio.subprocess.Process, ended: Callable[[], object]) -> None:
    assert process.stdout is not None
    async for _ in process.stdout:
        ended()
    if await process.wait() != 0:
        raise ClientError(f"A client process ended with {process.returncode}.")


async def _finish(
    processes: list[asyncio.subprocess.Process], reading: asyncio.Future[list[None]], stop: asyncio.Event
) -> None:
    """Until all processes have ended; when told to stop, soon."""
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((reading, stopped), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            for process in processes:
                assert process.stdin is not None
                process.stdin.close()
        await asyncio.wait_for(reading, _STOP_TIMEOUT_S if stop.is_set() else None)
    except TimeoutError:
        raise ClientError(f"A client process did not stop within {_STOP_TIMEOUT_S:g} s.") from None
    finally:
        stopped.cancel()


def _results(path: Path) -> Results:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except FileNotFoundError:
        raise ClientError("A client process ended without results.") from None
