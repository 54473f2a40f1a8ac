"""What a follower's main thread does: the same steps and commands on its own runner, in the order of host 0."""

from __future__ import annotations

import collections
import dataclasses
import functools
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from jaxserve.commands import AdapterCommand, Command, StartProfile, StopProfile
from jaxserve.hosts.follower import Follower
from jaxserve.hosts.protocol import Execute, Forward, ReadLogits, Sample, StepMessage, Undo, weights_of
from jaxserve.hosts.reversible import Reversible
from jaxserve.runner import LogitLines, Runner

_IDLE_S = 0.05


class Replay:
    def __init__(self, runner: Runner, follower: Follower, rank: int, *, model_path: str, load_format: str) -> None:
        self._runner = runner
        self._follower = follower
        self._rank = rank
        self._reversible = Reversible(runner, model_path, load_format)
        self._handle: Any = None  # of the step that is not sampled yet
        self._launched: collections.deque[Any] = collections.deque()
        # Steps that are launched and not looked at: as many as host 0 has, and one for the way.
        self._in_flight = runner.spec.num_stages + 1

    def run(self) -> None:
        """Until the process is ended by the follower's thread. Raises what a step raises here."""
        while True:
            message = self._follower.receive(_IDLE_S)
            if message is None:
                self._fetch(keep=0)
            else:
                self._do(message)

    def _do(self, message: StepMessage) -> None:
        match message:
            case Forward(step=step):
                self._handle = self._runner.forward(step)
            case ReadLogits(lines=lines):
                self._runner.read_logits(self._handle, lines)
            case Sample(masks=masks, changed_lines=lines, changed_logits=logits):
                changed = None if lines is None or logits is None else LogitLines(lines, logits)
                self._runner.sample(self._handle, masks, changed)
                self._launched.append(self._handle)
                self._fetch(keep=self._in_flight)
            case Execute(number=number):
                command = message.command
                if not isinstance(command, AdapterCommand):  # which may take long, and no step waits for them
                    self._fetch(keep=0)
                self._execute(number, command, message.weights)
            case Undo(number=number, adapter_id=None):
                self._report(number, self._reversible.undo())
            case Undo(number=number, adapter_id=int(adapter_id)):
                self._report(number, self._reversible.undo_reading(adapter_id))

    def _execute(self, number: int, command: Command, weights: str) -> None:
        if weights_of(command) != weights:
            if not isinstance(command, AdapterCommand):
                self._reversible.forget()
            self._follower.report(number, "its files there are not those of host 0.")
            return
        self._report(number, [self._reversible.execute(_for_host(command, self._rank))])

    def _fetch(self, *, keep: int) -> None:
        """The results are host 0's to read; here a step's failure shows, and what it held is let go."""
        while len(self._launched) > keep:
            self._runner.fetch(self._launched.popleft())

    def _report(self, number: int, parts: list[Future[None]]) -> None:
        """When the last one is done, as they are done one after the other."""
        if not parts:
            self._follower.report(number, "")
        else:
            parts[-1].add_done_callback(functools.partial(self._say, number, parts))

    def _say(self, number: int, parts: list[Future[None]], last: Future[None]) -> None:
        errors = [error for part in parts if (error := part.exception()) is not None]
        self._follower.report(number, " ".join(str(error) or type(error).__name__ for error in errors))


def _for_host(command: Command, rank: int) -> Command:
    """Hosts may share a file system: what they write has their number."""
    if isinstance(command, StartProfile):
        return dataclasses.replace(command, folder=str(Path(command.folder) / f"host-{rank}"))
    if isinstance(command, StopProfile) and command.memory_file is not None:
        path = Path(command.memory_file)
        return dataclasses.replace(command, memory_file=str(path.with_name(f"host-{rank}-{path.name}")))
    return command
