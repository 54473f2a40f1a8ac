"""BroadcastRunner: host 0's Runner. What it is asked to do it has the other hosts do as well, and then does it itself.

A step is one program over the devices of all hosts, so each must launch the same programs with the same inputs in the same
order. Which program that is follows from the step and from what was compiled, which is everywhere the same.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, get_args

import numpy as np

from jaxserve.commands import Command, CommandError, ExpertRecordCommand, ReadAdapter
from jaxserve.hosts.leader import Leader
from jaxserve.hosts.protocol import Execute, Forward, ReadLogits, Sample, Undo
from jaxserve.hosts.reversible import Reversible
from jaxserve.runner import LogitLines, Runner, RunnerSpec, StepInput, StepOutput


class BroadcastRunner:
    def __init__(self, runner: Runner, leader: Leader, *, model_path: str, load_format: str) -> None:
        """`runner` of this host; its weights came from `model_path`."""
        self._runner = runner
        self._leader = leader
        self._reversible = Reversible(runner, model_path, load_format)
        self._numbers = itertools.count()
        self._thread = ThreadPoolExecutor(1, "host-commands")

    @property
    def spec(self) -> RunnerSpec:
        return self._runner.spec

    def forward(self, step: StepInput) -> Any:
        self._leader.send(Forward(step=step))
        return self._runner.forward(step)

    def read_logits(self, handle: Any, lines: np.ndarray) -> np.ndarray:
        self._leader.send(ReadLogits(lines=lines))
        return self._runner.read_logits(handle, lines)

    def sample(self, handle: Any, masks: np.ndarray | None = None, changed: LogitLines | None = None) -> None:
        lines, logits = (None, None) if changed is None else (changed.lines, changed.logits)
        self._leader.send(Sample(masks=masks, changed_lines=lines, changed_logits=logits))
        self._runner.sample(handle, masks, changed)

    def fetch(self, handle: Any) -> StepOutput:
        return self._runner.fetch(handle)

    def execute(self, command: Command) -> Future[None]:
        """Carried out on all hosts, or taken back where it was. What a host refuses is said with its number."""
        if isinstance(command, get_args(ExpertRecordCommand)):  # host 0's counts are everybody's
            return self._runner.execute(command)
        number = next(self._numbers)
        theirs = self._leader.replies_to(number)
        self._leader.send(Execute.of(number, command))
        return self._thread.submit(self._finish, command, theirs, self._reversible.execute(command))

    def annotate(self, name: str, **facts: Any) -> AbstractContextManager[Any]:
        return self._runner.annotate(name, **facts)

    def tend(self) -> int:
        return self._runner.tend()

    def internal_state(self) -> dict[str, Any]:
        return {**self._runner.internal_state(), "hosts": self._leader.names}

    # --- in the thread of commands

    def _finish(self, command: Command, theirs: Future[dict[int, str]], mine: Future[None]) -> None:
        error = _error_of(mine)
        refused = {rank: text for rank, text in {0: error, **theirs.result()}.items() if text}
        if not refused:
            return
        if len(refused) <= len(theirs.result()):
            self._undo(command.adapter_id if isinstance(command, ReadAdapter) else None)
        raise CommandError(error or _with_rank(refused))

    def _undo(self, adapter_id: int | None) -> None:
        number = next(self._numbers)
        theirs = self._leader.replies_to(number)
        self._leader.send(Undo(number=number, adapter_id=adapter_id))
        mine = self._reversible.undo() if adapter_id is None else self._reversible.undo_reading(adapter_id)
        errors = {0: "".join(map(_error_of, mine)), **theirs.result()}
        stuck = {rank: text for rank, text in errors.items() if text}
        if stuck:
            self._leader.fail(f"Hosts are not in the same state any more, and one cannot go back. {_with_rank(stuck)}")


def _error_of(done: Future[None]) -> str:
    error = done.exception()
    return "" if error is None else str(error) or type(error).__name__


def _with_rank(errors: dict[int, str]) -> str:
    rank = min(errors)
    return f"Host {rank}: {errors[rank]}"
