"""What a section of the benchmark is made of: named cases, each of which runs alone and returns a dictionary of numbers.

A case may fail, hang or take its process down; the others must not suffer. So a section's module only offers
`cases(setting)`, `worker` runs them in a process of its own, and `supervisor` watches that process and starts it again behind
a case that broke it. Cases therefore share nothing but what their module caches.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Numbers = dict[str, Any]
CompilerOptions = dict[str, Any] | None  # what XLA compiles with, beside its flags
# Runs on the device what was prepared. Times are in `us`, with `bytes` and `flop` from which the report makes rates.
Measure = Callable[[], Numbers]

RUN_LIMIT_S = 10.0
PREPARE_LIMIT_S = 120.0


class NotHereError(Exception):
    """A case that this machine or software cannot run; its text is the recorded reason."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How to run: at full size on a GPU, or as a smoke test with tiny shapes on a CPU, where kernels are interpreted."""

    smoke: bool = False
    out: Path = Path()  # for what a case leaves beside its numbers
    shape: str = ""  # of `tune`, as `Shape` in tune.py reads it

    @property
    def interpret(self) -> Any:
        """What kernels take as `interpret`."""
        if not self.smoke:
            return None
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return plgpu.InterpretGPUParams(uninitialized_memory="nan")

    @property
    def patience(self) -> float:
        """What limits are multiplied with: an interpreted kernel takes seconds, and CI's machine has other things to do."""
        return 10.0 if self.smoke else 1.0

    def recover(self) -> None:
        """After a failed case: the interpreter keeps the state of the kernel that failed."""
        callbacks = sys.modules.get("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
        if callbacks is not None:
            callbacks.reset_gpu_interpret_mode_state()

    def needs_cuda(self) -> None:
        """Raises NotHereError in the smoke mode."""
        if self.smoke:
            raise NotHereError("needs a CUDA device")


@dataclasses.dataclass(frozen=True)
class Case:
    """`prepare` makes inputs and compiles, and returns what runs them: only the second can hang on the device."""

    name: str
    prepare: Callable[[], Measure]
    limit_s: float = RUN_LIMIT_S  # a case that runs longer hangs, and is ended
    prepare_limit_s: float = PREPARE_LIMIT_S
