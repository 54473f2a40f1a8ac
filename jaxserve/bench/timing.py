"""Time per call of something that runs on a device, without a profiler.

JAX has no device events. A case is therefore a compiled loop of N calls, one after the other on the device. The host launches
it once and waits, and launches it several times and waits once: what the second takes longer, the further calls took. Starting
to launch and waiting for the end are in both. Loops last milliseconds, so the host's clock is precise enough; each pair is
repeated, and median, fastest and slowest are kept.

What the host does to launch a call hides behind the call before, unless that is shorter (10 to 20 us): then a launch is what is
measured. The loop's own small kernels, which compute offsets, are counted too, a few us a call.

Every call reads other memory than the one before (see Rotation), so that nothing is found in the L2 cache. The offsets come
out of the loop's counter and numbers that the compiler does not know: a call that is always the same would be moved out.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# A call: (index of the call as int32 scalar, carry, operands) -> carry.
Call = Callable[[jax.Array, Any, Any], Any]

# So much must pass between two readings of the same bytes: several times the L2 of any GPU we know (H200: 60 MB).
COLD_BYTES = 200 << 20

# Launches of a loop whose end the host waits for once, beside one.
_MORE = 3


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long to measure."""

    loop_us: float = 6000.0  # long against the host's clock and its waking up (tens of µs)
    repeats: int = 7
    most_calls: int = 256

    def calls(self, expected_us: float) -> int:
        """Calls in a loop, where one is expected to take so long."""
        return max(min(2, self.most_calls), min(self.most_calls, int(self.loop_us / max(expected_us, 1e-3))))


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds per call."""

    us: float  # median
    us_min: float
    us_max: float
    us_alone: float  # median of a loop that is launched and waited for by itself
    calls: int
    repeats: int

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in dataclasses.asdict(self).items()}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotation:
    """Which copy of the data a call works on: `copies` of them, `stride` apart."""

    copies: jax.Array  # int32 scalars
    stride: jax.Array

    @staticmethod
    def of(copies: int, stride: int) -> Rotation:
        return Rotation(jnp.int32(copies), jnp.int32(stride))

    def offset(self, index: jax.Array) -> jax.Array:
        """Where the copy for call `index` begins. With one copy always 0, which only we know."""
        return jax.lax.rem(index, self.copies) * self.stride


def copies_needed(nbytes: int) -> int:
    """Copies of data of `nbytes` to rotate among, so that COLD_BYTES pass before one is read again."""
    return 1 if nbytes >= COLD_BYTES else -(-COLD_BYTES // max(nbytes, 1)) + 1


@dataclasses.dataclass(frozen=True)
class CompiledCalls:
    """A loop of calls, compiled; nothing of it has run."""

    program: jax.stages.Compiled
    carry: Any
    operands: Any
    calls: int
    plan: Plan

    def time(self) -> tuple[Timing, Any]:
        """Once: the carry is donated. Returns the last one, to be looked at."""
        carry, _ = self._run(self.carry, 1)  # warm: modules loaded, clocks up
        alone_us, us = [], []
        for _ in range(self.plan.repeats):
            carry, one_us = self._run(carry, 1)
            carry, several_us = self._run(carry, 1 + _MORE)
            alone_us.append(one_us / self.calls)
            # On a busy machine one may take longer than several: never below a tenth of what was seen.
            us.append(max((several_us - one_us) / _MORE, one_us / 10) / self.calls)
        median = statistics.median
        return Timing(median(us), min(us), max(us), median(alone_us), self.calls, self.plan.repeats), carry

    def _run(self, carry: Any, launches: int) -> tuple[Any, float]:
        """The carry, and how many microseconds passed until it was there."""
        start_s = time.perf_counter()
        for _ in range(launches):
            carry = self.program(carry, self.operands)
        return jax.block_until_ready(carry), (time.perf_counter() - start_s) * 1e6


def compile_calls(call: Call, carry: Any, operands: Any, calls: int, plan: Plan) -> CompiledCalls:
    """A loop of `calls` calls. `carry` is donated when it runs."""

    def loop(carry: Any, operands: Any) -> Any:
        return jax.lax.fori_loop(0, calls, lambda index, carry: call(index, carry, operands), carry)

    program = jax.jit(loop, donate_argnums=0).lower(carry, operands).compile()
    return CompiledCalls(program, carry, operands, calls, plan)
