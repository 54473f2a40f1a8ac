"""A client process: `python -m jaxserve.bench.serving.client FOLDER NUMBER TICKETS`, started by `clients`.

    FOLDER/load.json, FOLDER/tasks.json -> "ready" on stdout -> a start time on stdin -> requests -> a line per ended task on
    stdout -> FOLDER/NUMBER.json with all outcomes

Tasks are shared out in one of two ways. With --max-concurrency each process has its part of the slots, and whoever has a slot
free takes the next task: TICKETS is an open file of their numbers that all processes read from, and reading moves them all on.
Without, process k of n sends tasks k, k + n, ... Everybody's clock is the machine's monotonic one. When stdin ends, what
runs is cancelled, and said to be.
"""

from __future__ import annotations

import asyncio
import os
import resource
import struct
import sys
import time
from collections.abc import Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from jaxserve.bench.serving.sending import send_task, session_of
from jaxserve.bench.serving.work import ClientReport, Load, Outcome, Task

TICKET = struct.Struct("<I")
_LAG_EVERY_S = 0.02


class Results(msgspec.Struct):
    outcomes: list[Outcome]
    report: ClientReport


class _Client:
    def __init__(self, load: Load, tasks: list[Task], number: int, tickets: int) -> None:
        self._load, self._tasks, self._number, self._tickets = load, tasks, number, tickets
        self._outcomes: list[Outcome] = []
        self._lags_s: list[float] = []
        self._stopping = False

    async def run(self, start_s: float, stop: asyncio.Event) -> Results:
        began_s, cpu_s = time.monotonic(), time.process_time()
        lag = asyncio.create_task(self._watch_lag())
        async with session_of(self._load) as session:
            work = asyncio.create_task(self._slots(session, start_s) if self._num_slots else self._free(session, start_s))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
            self._stopping = True
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if not work.cancelled() and (error := work.exception()) is not None:
                raise error
        lag.cancel()
        lags = sorted(self._lags_s) or [0.0]
        report = ClientReport(
            cpu_s=time.process_time() - cpu_s,
            duration_s=time.monotonic() - began_s,
            num_events=sum(outcome.num_events for outcome in self._outcomes),
            max_lag_s=lags[-1],
            p99_lag_s=lags[int(0.99 * (len(lags) - 1))],
        )
        return Results(self._outcomes, report)

    @property
    def _num_slots(self) -> int:
        """This process's part of --max-concurrency; 0: no limit."""
        limit, n = self._load.max_concurrency, self._load.num_processes
        return 0 if limit is None else len(range(self._number, limit, n))

    async def _slots(self, session: aiohttp.ClientSession, start_s: float) -> None:
        async def slot() -> None:
            for number in self._taken():
                await self._send(session, start_s, number)

        await _all(slot() for _ in range(self._num_slots))

    async def _free(self, session: aiohttp.ClientSession, start_s: float) -> None:
        numbers = range(self._number, len(self._tasks), self._load.num_processes)
        await _all(self._send(session, start_s, number) for number in numbers)

    def _taken(self) -> Iterator[int]:
        while not self._stopping and len(ticket := os.read(self._tickets, TICKET.size)) == TICKET.size:
            yield TICKET.unpack(ticket)[0]

    async def _send(self, session: aiohttp.ClientSession, start_s: float, number: int) -> None:
        task = self._tasks[number]
        wait_s = start_s + task.arrival_s - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        outcomes = await send_task(session, self._load, number, task)
        self._outcomes += outcomes
        print("ended", flush=True)

    async def _watch_lag(self) -> None:
        """How late this process hears of what has happened."""
        while True:
            due_s = time.monotonic() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._lags_s.append(time.monotonic() - due_s)


async def _all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Until all have ended, also when cancelled: then each has said what came of it."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def main(folder: Path, number: int, tickets: int) -> None:
    load = msgspec.json.decode((folder / "load.json").read_bytes(), type=Load)
    tasks = msgspec.json.decode((folder / "tasks.json").read_bytes(), type=list[Task])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a connection is a file
    client, stop = _Client(load, tasks, number, tickets), asyncio.Event()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print("ready", flush=True)
    line = await reader.readline()
    if not line:
        return

    async def watch() -> None:
        await reader.read()
        stop.set()

    watching = asyncio.create_task(watch())
    results = await client.run(float(line), stop)
    (folder / f"{number}.json").write_bytes(msgspec.json.encode(results))
    watching.cancel()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
