"""The abuse in rounds: everything at once for a while, then quiet, and the server must be as it was before.

First nothing but the witness, for comparison; then rounds; then rounds in which a process is killed or stopped. What each
of many takes up next is drawn from the seed, the round and its number.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from benchmarks.abuse import bodies, broken_http, clients, features, kills
from benchmarks.abuse.arena import Action, Arena
from benchmarks.abuse.measures import Measures
from benchmarks.abuse.subject import Subject
from benchmarks.abuse.tally import Tally

_CROWD: list[Action] = [*broken_http.ACTIONS, *bodies.ACTIONS, *clients.ACTIONS, *features.ACTIONS]
_OPERATOR: list[Action] = [*bodies.OPERATOR, *clients.OPERATOR]
_OPERATOR_PAUSE_S = (3.0, 9.0)  # between two things an operator does, so that there is calm to measure in
_PATIENCE_S = 100.0  # for actions at the end of a round; each of their requests may take 60 s
_SETTINGS = ("request_waiting_timeout_s", "request_running_timeout_s", "max_queued_requests", "decode_log_interval")


class Mix:
    def __init__(self, subject: Subject, seed: int, crowd: int, round_s: float) -> None:
        self.tally = Tally()
        self.measures = Measures()
        self.rounds = 0
        self.kills = 0
        self._subject = subject
        self._seed = seed
        self._crowd = crowd
        self._round_s = round_s
        self._witness: subprocess.Popen[bytes] | None = None
        self._sampling: asyncio.Task[None] | None = None

    async def run(self, alone_s: float, mixed_s: float, killing_s: float) -> None:
        await self._subject.start()
        self._sampling = asyncio.create_task(self._sample_memory())
        self._witness = subprocess.Popen(  # noqa: ASYNC220
            [
                sys.executable,
                "-m",
                "benchmarks.abuse.witness",
                str(self._subject.port),
                str(self._subject.folder / "witness.jsonl"),
            ]
        )
        self.measures.mark("alone")
        await asyncio.sleep(alone_s)
        self.measures.mark("mixed")
        arena = await self._new_arena()
        await self._until(mixed_s, lambda: self._round(arena))
        if killing_s:
            self.measures.mark("killing")
            await self._until(killing_s, self._killing_round)

    async def close(self) -> None:
        """Ends what run started; to be called whatever became of it. The server must end as on any other day."""
        if self._witness is not None:
            self._witness.kill()
            self._witness.wait()
        if self._sampling is not None:
            self._sampling.cancel()
        if self._subject.process is not None:
            status = await self._subject.stop()
            if status != 0:
                self.tally.fail("server", f"exit {status} after SIGTERM in peace", str(self._subject.log))
        for last, trace in self._subject.traces():
            self.tally.fail("log", f"a traceback: {last}", trace)

    async def _until(self, seconds: float, step: Callable[[], Awaitable[None]]) -> None:
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            self.rounds += 1
            await step()

    async def _new_arena(self) -> Arena:
        description = await self._subject.fetch("/openapi.json")
        state = await self._subject.state()
        settings = {name: state[name] for name in _SETTINGS}
        schemas = description.get("components", {}).get("schemas", {})
        return Arena(
            self._subject.port, self.tally, description["paths"], schemas, settings, disturbances=self.measures.disturbances
        )

    async def _round(self, arena: Arena) -> None:
        failures = sum(self.tally.failures.values())
        async with self._abused(arena):
            await asyncio.sleep(self._round_s)
        await self._check(arena)
        if self._subject.process is None or self._subject.process.poll() is not None:
            self.tally.fail("server", "ended in the middle of the mix", self._subject.log.read_text(errors="replace")[-2000:])
            await self._subject.start()
        new = sum(self.tally.failures.values()) - failures
        print(f"round {self.rounds}: {self.tally.requests()} requests, {new} new failures", file=sys.stderr, flush=True)

    async def _killing_round(self) -> None:
        """Half a round of abuse, a signal in its midst, and a new server if the old one has ended."""
        arena = await self._new_arena()
        draw = random.Random(f"{self._seed}/{self.rounds}/kill")
        kind = kills.KINDS[self.kills % len(kills.KINDS)]
        self.kills += 1
        started_s = time.time()
        async with self._abused(arena):
            await asyncio.sleep(draw.uniform(0.2, 0.5) * self._round_s)
            await kills.strike(self._subject, arena, draw, kind)
        if arena.away:
            self._subject.kill()
            await self._subject.start()
            self.measures.disturbances.append((started_s, time.time()))
        else:
            await self._check(arena)
        print(f"round {self.rounds}: {kind}", file=sys.stderr, flush=True)

    @contextlib.asynccontextmanager
    async def _abused(self, arena: Arena) -> AsyncIterator[None]:
        over = asyncio.Event()
        tasks = {asyncio.create_task(self._act(arena, number, over, _CROWD, (0, 0))) for number in range(self._crowd)}
        tasks.add(asyncio.create_task(self._act(arena, -1, over, _OPERATOR, _OPERATOR_PAUSE_S)))
        try:
            yield
        finally:
            over.set()
            _, late = await asyncio.wait(tasks, timeout=_PATIENCE_S)
            for task in late:
                task.cancel()
                self.tally.fail("mix", f"an action did not end within {_PATIENCE_S:g} s")

    async def _act(
        self, arena: Arena, number: int, over: asyncio.Event, actions: list[Action], pause_s: tuple[float, float]
    ) -> None:
        draw = random.Random(f"{self._seed}/{self.rounds}/{number}")
        weights = [action.weight for action in actions]
        while not over.is_set():
            [action] = draw.choices(actions, weights)
            try:
                await action.run(arena, random.Random(draw.random()))
            except Exception as error:  # a defect of ours, or a reply that is not what its status promises
                arena.failed(action.kind, f"{type(error).__name__} in the client", str(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), draw.uniform(*pause_s) + (0.2 if arena.away else 0))

    async def _check(self, arena: Arena) -> None:
        """The witness goes on meanwhile: the server is idle between two of its requests."""
        try:
            async with arena.disturbing():
                await bodies.undo(arena)
            wrong = await self._subject.whole()
        except (OSError, TimeoutError, ValueError) as error:
            wrong = f"no state: {type(error).__name__}: {error}"
        if wrong:
            self.tally.fail("server", f"not whole after round {self.rounds}", wrong)

    async def _sample_memory(self) -> None:
        while True:
            self.measures.memory.append((time.time(), self._subject.starts, self._subject.resident_mb()))
            await asyncio.sleep(1)
