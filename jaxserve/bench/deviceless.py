"""What Runners without a device have in common: they take no commands, show no logits, compile nothing."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from jaxserve.commands import Command, CommandError
from jaxserve.runner import LogitLines, RunnerSpec

_NO_TRACE = nullcontext()


class DevicelessRunner:
    """`forward` and `fetch` are its own."""

    def __init__(self, spec: RunnerSpec) -> None:
        self.spec = spec

    def read_logits(self, handle: Any, lines: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def sample(self, handle: Any, masks: np.ndarray | None = None, changed: LogitLines | None = None) -> None:
        pass

    def execute(self, command: Command) -> Future[None]:
        raise CommandError("This runner has neither weights nor memory.")

    def annotate(self, name: str, **facts: Any) -> AbstractContextManager[None]:
        return _NO_TRACE

    def tend(self) -> int:
        return 0

    def internal_state(self) -> dict[str, Any]:
        return {}
