"""What is timed: one call of a kernel, with all that it needs, in the form that jaxserve.bench.timing runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxserve.bench.inputs import AttentionCase, AttentionInputs, make_inputs
from jaxserve.bench.timing import Call, Plan, Timing, compile_calls


@dataclasses.dataclass(frozen=True)
class Runnable:
    call: Call
    carry: Any  # what it starts from: the result's buffer
    operands: Any


def compile_runnable(
    case: AttentionCase, make: Callable[[AttentionInputs], Runnable], plan: Plan, row_dim: int | None = None
) -> Callable[[], Timing]:
    """What times it, once; all that compiles is compiled. `row_dim`: as make_inputs has it.

    FloatingPointError if a result is not finite: such a kernel's time says nothing.
    """
    calls = plan.calls(case.expected_us)
    runnable = make(make_inputs(case, calls, row_dim=row_dim))
    compiled = compile_calls(runnable.call, runnable.carry, runnable.operands, calls, plan)

    def time() -> Timing:
        timing, out = compiled.time()
        if not bool(jnp.isfinite(out).all()):
            raise FloatingPointError("the result is not finite")
        return timing

    return time


def time_runnable(
    case: AttentionCase, make: Callable[[AttentionInputs], Runnable], plan: Plan, row_dim: int | None = None
) -> Timing:
    """Compiles and times it."""
    return compile_runnable(case, make, plan, row_dim)()
