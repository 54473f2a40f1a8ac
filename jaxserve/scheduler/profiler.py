"""Profiler: from which step to which a trace is taken, and where it goes.

    start -> (the first step of the trace is launched) -> begin -> (its last step is done) -> end -> (files are complete)

A trace begins right before a step is launched, or at once; it ends between two steps, when the results of all its steps are in.
The files are written while other steps run, unless another trace is to follow. The runner takes the trace (`StartProfile`,
`StopProfile`); this knows steps only.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.commands import CommandError, StartProfile, StopProfile
from jaxserve.messages import ProfileBegan, ProfileEnded, WorkerAddress
from jaxserve.runner import Runner

if TYPE_CHECKING:  # the main process has this module too, for the request's sake, and none of the scheduler
    from jaxserve.scheduler.batch import ScheduleBatch
    from jaxserve.scheduler.pace import Pace
    from jaxserve.scheduler.stages import StageClock

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "JAXSERVE_PROFILER_DIR"
PREFILL, DECODE = "prefill", "decode"
STAGES = (PREFILL, DECODE)
_ALL = ""  # the stage of a trace that takes steps as they come
_FINISH_S = 10.0  # what a trace has to be completed at the end of the process
_NAME = re.compile(r"[\w.-]{1,128}")


@dataclasses.dataclass(frozen=True)
class ProfilePlan:
    folder: str
    first_step: int | None = None  # since the start of the process; None: from now on
    num_steps: int | None = None  # of each trace; None: until it is stopped
    stages: tuple[str, ...] = ()  # a trace for each; empty: one for all steps
    traces_host: bool = True
    traces_python: bool = False
    saves_memory: bool = False


@dataclasses.dataclass
class _Trace:
    folder: str
    stage: str
    steps_left: int | None
    memory_file: str | None


class Profiler:
    def __init__(
        self,
        runner: Runner,
        pace: Pace,
        stages: StageClock,
        take_in: Callable[[], None],
        tell: Callable[[ProfileBegan | ProfileEnded], None],
        worker: WorkerAddress,
    ) -> None:
        """`take_in` waits for all launched steps and takes in their results. `tell`: the processes behind this one."""
        self._runner = runner
        self._pace = pace
        self._stages = stages
        self._take_in = take_in
        self._tell = tell
        self._worker = worker
        self._num_launched = 0
        self._plan: ProfilePlan | None = None
        self._stages_left: list[str] = []
        self._trace: _Trace | None = None
        self._completing: Future[None] | None = None  # of the trace that ended last
        self._ended: ProfileEnded | None = None  # what is said of it then
        self._failure = ""  # of that one
        self._last_folder = ""

    @property
    def folder(self) -> str | None:
        """Of the profile that is being taken, or waits for its step."""
        return None if self._plan is None else self._plan.folder

    # --- what control requests ask

    def start(self, plan: ProfilePlan) -> None:
        """Raises CommandError."""
        assert self._plan is None, "wait_until_free comes first"
        self._plan, self._stages_left, self._failure = plan, list(plan.stages or (_ALL,)), ""
        self._last_folder = plan.folder
        if not plan.stages and plan.first_step is None:
            try:
                self._begin(_ALL)
            except CommandError:
                self._plan = None
                raise

    def wait_until_free(self) -> Generator[None, None, None]:
        """Until the files of the last profile are complete. CommandError while one is being taken, or waits for its step."""
        while not self._collect() and not self._stages_left:
            yield
        if self._plan is not None:
            raise CommandError(f"A profile is being taken already, to {self._plan.folder}: stop it first.")

    def stop(self) -> Generator[None, None, str]:
        """The folder, once the trace is complete; "" if none had begun. Raises CommandError."""
        self._collect()
        if self._plan is None:
            last = f" The last one ended by itself; it is in {self._last_folder}." if self._last_folder else ""
            raise CommandError(f"No profile is being taken.{last}")
        self._stages_left.clear()
        if self._trace is not None:
            self._end()
        elif self._completing is None:
            self._plan, self._last_folder = None, ""
            return ""
        while not self._collect():
            yield
        if self._failure:
            raise CommandError(self._failure)
        return self._last_folder

    def finish(self) -> None:
        """At the end of the process: a trace that runs is completed."""
        self._stages_left.clear()
        if self._trace is not None:
            self._end()
        if self._completing is not None:
            try:
                self._completing.result(_FINISH_S)
            except (CommandError, TimeoutError) as error:
                logger.error("The profile in %s is not complete: %s", self._last_folder, error or "it took too long.")

    # --- what the scheduler does

    def launching(self, batch: ScheduleBatch) -> AbstractContextManager[Any]:
        """Around the launch of each step."""
        self._num_launched += 1
        if self._plan is not None:
            self._count(batch, self._plan)
        return self._stages.launch(self._num_launched, batch)

    def tend(self) -> None:
        """Between two steps."""
        if self._trace is not None and self._trace.steps_left == 0:
            self._end()
        self._collect()

    # --- inside

    def _count(self, batch: ScheduleBatch, plan: ProfilePlan) -> None:
        stage = PREFILL if batch.items else DECODE
        is_due = plan.first_step is None or self._num_launched >= plan.first_step
        if self._trace is None and self._completing is None and is_due and self._stages_left[:1] in ([_ALL], [stage]):
            try:
                self._begin(self._stages_left[0])
            except CommandError as error:
                logger.error("%s", error)
                self._plan, self._failure = None, str(error)
        trace = self._trace
        if trace is None or trace.steps_left is None:
            return
        if trace.stage in (_ALL, stage):
            trace.steps_left = max(0, trace.steps_left - 1)
        elif trace.stage == PREFILL and self._stages_left:
            trace.steps_left = 0  # decoding has begun, and has a trace of its own

    def _begin(self, stage: str) -> None:
        assert self._plan is not None
        plan, folder = self._plan, Path(self._plan.folder, stage)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"{str(folder)!r} cannot be made: {error.strerror}.") from error
        self._runner.execute(StartProfile(str(folder), plan.traces_host, plan.traces_python)).result()
        memory_file = str(folder / "memory.pprof") if plan.saves_memory else None
        self._stages_left.remove(stage)
        self._trace = _Trace(str(folder), stage, plan.num_steps, memory_file)
        self._stages.show()
        self._tell(ProfileBegan(source=self._worker))
        logger.info("Profiling to %s.", folder)

    def _end(self) -> None:
        assert self._trace is not None
        trace = self._trace
        self._take_in()
        self._trace = None
        self._stages.hide()
        self._ended = ProfileEnded(folder=trace.folder, ended_ns=time.time_ns(), source=self._worker)
        self._completing = self._runner.execute(StopProfile(trace.memory_file))
        self._pace.awaits_profile = bool(self._stages_left)

    def _collect(self) -> bool:
        """Whether nothing is being completed any more."""
        if self._completing is None or not self._completing.done():
            return self._completing is None
        error, self._completing = self._completing.exception(), None
        self._pace.awaits_profile = False
        assert self._ended is not None
        self._tell(self._ended)
        if error is not None:
            self._failure = str(error)
            logger.error("%s", error)
        if error is not None or not self._stages_left:
            self._plan = None
            logger.info("The profile is in %s.", self._last_folder)
        return True


def folder_for(args_folder: str | None, output_dir: str | None, name: str | None, prefix: str | None) -> str:
    """A new folder. CommandError if it cannot be made."""
    for field, value in (("profile_id", name), ("profile_prefix", prefix)):
        if value is not None and (not _NAME.fullmatch(value) or not value.strip(".")):
            raise CommandError(f"{field} must be 1 to 128 letters, digits, '.', '_' and '-', got {value!r}.")
    parent = Path(output_dir or args_folder or os.environ.get(FOLDER_VARIABLE) or _default_parent())
    wanted = "-".join(part for part in (prefix, name or time.strftime("%Y-%m-%d_%H-%M-%S")) if part)
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for count in itertools.count(1):
            folder = parent / (wanted if count == 1 else f"{wanted}-{count}")
            try:
                folder.mkdir()
                return str(folder.absolute())
            except FileExistsError:
                continue
    except (OSError, ValueError) as error:  # the latter: a NUL
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"Profiles cannot be written to {str(parent)!r}: {reason}.") from error
    raise AssertionError("some number is free")


def _default_parent() -> str:
    return os.path.join(tempfile.gettempdir(), f"jaxserve-profiles-{os.getuid()}")
