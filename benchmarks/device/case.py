"""What a section of the benchmark is made of: named cases, each of which runs alone and returns a dictionary of numbers.

A case may fail, hang or take its process down; the others must not suffer. So a section module only offers `cases(setting)`,
`worker` runs them in a process of its own, and `supervisor` watches that process and starts it again behind a case that broke
it. Cases therefore share nothing but what their module caches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

# Section -> module. In the order in which they run: what everything else is measured against first, comparisons last.
SECTIONS = {
    "ceilings": "benchmarks.device.ceilings",
    "checks": "benchmarks.device.checks",
    "decode": "benchmarks.device.decode",
    "extend": "benchmarks.device.extend",
    "mla": "benchmarks.device.mla",
    "write": "benchmarks.device.write",
    "model": "benchmarks.device.model",
    "jax": "benchmarks.device.alternatives_jax",
    "torch": "benchmarks.device.alternatives_torch",
}


class NotHereError(Exception):
    """A case that this machine or software cannot run; its text is the recorded reason."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How to run: at full size on a GPU, or as a smoke test with tiny shapes on a CPU, where kernels are interpreted."""

    smoke: bool = False

    @property
    def interpret(self) -> Any:
        """What kernels take as `interpret`."""
        if not self.smoke:
            return None
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return plgpu.InterpretGPUParams(uninitialized_memory="nan")

    def recover(self) -> None:
        """After a failed case: the interpreter keeps the state of the kernel that failed."""
        if self.smoke:
            from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

            gpu_callbacks.reset_gpu_interpret_mode_state()

    def needs_cuda(self) -> None:
        """Raises NotHereError in the smoke mode."""
        if self.smoke:
            raise NotHereError("needs a CUDA device")


@dataclasses.dataclass(frozen=True)
class Case:
    """`run` returns what goes into the JSON. Times are in `us`, with `bytes` and `flop` from which the report makes rates."""

    name: str
    run: Callable[[], dict[str, Any]]
    limit_s: float = 45.0  # a case that takes longer hangs, and is ended
