"""A lane of the compiler: one thread that works through its jobs, on a stack large enough for whatever passed a trial."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from jaxserve.grammar.trial import COMPILE_STACK_BYTES, TrialProcess


class Lane:
    """The thread starts with the first job and ends with the process."""

    def __init__(self, name: str, trial: TrialProcess) -> None:
        self.trial = trial  # for the jobs of this lane
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: Callable[[], None]) -> None:
        """`job` must not raise."""
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            before = threading.stack_size(COMPILE_STACK_BYTES)
            try:
                self._thread.start()
            finally:
                threading.stack_size(before)

    def _run(self) -> None:
        while True:
            self._jobs.get()()
