"""Signals from outside: a worker that is killed ends the server with a reason, one that is stopped for seconds does not."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal

import psutil

from benchmarks.abuse.arena import Arena
from benchmarks.abuse.subject import Subject

_ENDS_WITHIN_S = 90.0  # a drain of 60 s included
_GONE_WITHIN_S = 15.0

KINDS = ("kill scheduler", "kill detokenizer", "stop scheduler", "stop detokenizer", "stop main", "end main", "kill main")


async def strike(subject: Subject, arena: Arena, draw: random.Random, kind: str) -> None:
    """Does it to a busy server and says in the tally what was not as designed. The server may have ended afterwards."""
    verb, name = kind.split()
    family = subject.processes()
    if name not in family:
        arena.tally.fail(f"signal: {kind}", f"there is no {name}")
    elif verb == "stop":
        await _pause(arena, family[name], kind, draw.uniform(1, 5))
    else:
        arena.away = True
        family[name].send_signal(signal.SIGTERM if verb == "end" else signal.SIGKILL)
        await _expect_end(subject, arena, kind, list(family.values()))


async def _pause(arena: Arena, process: psutil.Process, kind: str, seconds: float) -> None:
    async with arena.disturbing():
        process.suspend()
        try:
            await asyncio.sleep(seconds)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        await asyncio.sleep(2)
    arena.tally.note(f"signal: {kind}", "went on")


async def _expect_end(subject: Subject, arena: Arena, kind: str, family: list[psutil.Process]) -> None:
    expected = {"end main": 0, "kill main": -signal.SIGKILL}.get(kind, 1)
    status = await subject.ended(_ENDS_WITHIN_S)
    arena.tally.note(f"signal: {kind}", f"exit {status}")
    if status != expected:
        arena.tally.fail(
            f"signal: {kind}", f"exit {status} instead of {expected}", subject.log.read_text(errors="replace")[-500:]
        )
    if expected == 1 and "SIGKILL" not in subject.log.read_text(errors="replace"):
        arena.tally.fail(f"signal: {kind}", "the log does not say why the server ended")
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, _GONE_WITHIN_S)
    if left := [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]:
        arena.tally.fail(f"signal: {kind}", "processes were left behind", left)
    subject.kill()
