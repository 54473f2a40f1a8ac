"""Time per call of something that runs on a device, without a profiler.

JAX has no device events. A case is therefore a compiled loop of N calls, one after the other on the device: the host waits
once for all of them, so that dispatching and waiting are paid once per loop. What is left of them, and the loop's own small
kernels (its counter, the offsets it computes), is measured with an empty loop of the same N and subtracted. Loops last
milliseconds, so the host's clock is precise enough; each is repeated, and median, fastest and slowest are kept.

Every call reads other memory than the one before (see Rotation), so that nothing is found in the L2 cache. The offsets come
out of the loop's counter and numbers that the compiler does not know: a call that is always the same would be moved out.
"""

from __future__ import annotations

import dataclasses
import functools
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


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long to measure."""

    loop_us: float = 6000.0  # long against the host's clock and its waking up (tens of µs)
    repeats: int = 7
    most_calls: int = 256

    def calls(self, expected_us: float) -> int:
        """Calls in a loop: a power of two, so that empty loops of few lengths are needed."""
        wanted = max(min(2, self.most_calls), min(self.most_calls, int(self.loop_us / max(expected_us, 1e-3))))
        return 1 << (wanted.bit_length() - 1)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds per call."""

    us: float  # median, the empty loop subtracted
    us_min: float
    us_max: float
    us_raw: float  # median, nothing subtracted
    us_empty: float  # of the empty loop
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
        raw_us, carry = _samples_us(self.program, self.carry, self.operands, self.calls, self.plan.repeats)
        return _timing(raw_us, _empty_loop_us(self.calls, self.plan.repeats), self.calls), carry


def compile_calls(call: Call, carry: Any, operands: Any, calls: int, plan: Plan) -> CompiledCalls:
    """A loop of `calls` calls. `carry` is donated when it runs."""
    program = _compile(_loop(call, calls), carry, operands)
    return CompiledCalls(program, carry, operands, calls, plan)


def _timing(raw_us: list[float], empty_us: float, calls: int) -> Timing:
    # An empty loop can be slower than a loop of calls shorter than a launch: never below a tenth of what was seen.
    net = [max(sample - empty_us, sample / 10) for sample in raw_us]
    return Timing(
        us=statistics.median(net),
        us_min=min(net),
        us_max=max(net),
        us_raw=statistics.median(raw_us),
        us_empty=empty_us,
        calls=calls,
        repeats=len(raw_us),
    )


def _loop(call: Call, calls: int) -> Callable[[Any, Any], Any]:
    def program(carry: Any, operands: Any) -> Any:
        return jax.lax.fori_loop(0, calls, lambda index, carry: call(index, carry, operands), carry)

    return program


def _compile(program: Callable[[Any, Any], Any], carry: Any, operands: Any) -> jax.stages.Compiled:
    return jax.jit(program, donate_argnums=0).lower(carry, operands).compile()


def _samples_us(
    program: Callable[[Any, Any], Any], carry: Any, operands: Any, calls: int, repeats: int
) -> tuple[list[float], Any]:
    carry = jax.block_until_ready(program(carry, operands))  # warm: modules loaded, clocks up
    samples = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        carry = jax.block_until_ready(program(carry, operands))
        samples.append((time.perf_counter() - start_s) * 1e6 / calls)
    return samples, carry


@functools.cache
def _empty_loop_us(calls: int, repeats: int) -> float:
    """Per call: a loop that computes an offset and runs one kernel of a few values."""

    def call(index: jax.Array, carry: jax.Array, rotation: Rotation) -> jax.Array:
        return jnp.cos(carry) + rotation.offset(index)

    carry, rotation = jnp.zeros(32, jnp.float32), Rotation.of(3, 5)
    samples, _ = _samples_us(_compile(_loop(call, calls), carry, rotation), carry, rotation, calls, repeats)
    return statistics.median(samples)
