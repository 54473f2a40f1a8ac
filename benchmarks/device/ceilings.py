"""What the device can do at best, measured: bandwidth of a copy and of reading, and a bf16 matrix product on random data.

Each through JAX and through torch; the better of the two is the ceiling that other sections are held against.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.device.case import Case, Measure, Numbers, Setting
from benchmarks.device.kernels import SMOKE_PLAN
from benchmarks.device.torch_timing import time_torch, torch_cuda
from jaxserve.bench.timing import CompiledCalls, Plan, compile_calls

FULL_WORDS, FULL_N = 1 << 30, 8192  # 4 GiB of 32-bit words: 70 times the L2


def _plan(setting: Setting) -> Plan:
    return SMOKE_PLAN if setting.smoke else Plan(loop_us=30_000)


def _words(setting: Setting) -> int:
    return 1 << 12 if setting.smoke else FULL_WORDS


def _n(setting: Setting) -> int:
    return 64 if setting.smoke else FULL_N


def _measure(compiled: CompiledCalls, **work: int) -> Measure:
    def measure() -> Numbers:
        return {**compiled.time()[0].as_dict(), **work}

    return measure


def _bits(count: int) -> jax.Array:
    return jax.jit(lambda: jax.random.bits(jax.random.key(0), (count,), jnp.uint32))()


def copy_jax(setting: Setting) -> Measure:
    """Each word is read, changed and written."""
    words = _bits(_words(setting))
    plan, nbytes = _plan(setting), 2 * words.nbytes
    calls = plan.calls(nbytes / 4e6)
    compiled = compile_calls(lambda index, words, _: words ^ (index + 1).astype(jnp.uint32), words, None, calls, plan)
    return _measure(compiled, bytes=nbytes)


def read_jax(setting: Setting) -> Measure:
    """A sum of all words, a different one in each call."""
    words = _bits(_words(setting))
    plan = _plan(setting)
    calls = plan.calls(words.nbytes / 4e6)

    def call(index: jax.Array, total: jax.Array, words: jax.Array) -> jax.Array:
        return total + jnp.sum(words ^ (index + 1).astype(jnp.uint32), dtype=jnp.uint32)

    return _measure(compile_calls(call, jnp.uint32(0), words, calls, plan), bytes=words.nbytes)


def matmul_jax(setting: Setting) -> Measure:
    """A chain of products; the second factor keeps the size of the numbers.

    A call is two of them: the second can be written where the first one's input was, a single one would be copied there.
    """
    n, plan = _n(setting), _plan(setting)
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (n, n), jnp.bfloat16) * n**-0.5
    flop = 4 * n**3
    calls = plan.calls(flop / 700e6)
    return _measure(compile_calls(lambda index, a, b: (a @ b) @ b, a, b, calls, plan), flop=flop)


def copy_torch(setting: Setting) -> Measure:
    torch = torch_cuda(setting)
    source = torch.randint(0, 1 << 30, (FULL_WORDS,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return lambda: {**time_torch([lambda: target.copy_(source)]), "bytes": 2 * source.nbytes}


def read_torch(setting: Setting) -> Measure:
    torch = torch_cuda(setting)
    source = torch.rand(FULL_WORDS, dtype=torch.float32, device="cuda")
    return lambda: {**time_torch([lambda: source.sum()]), "bytes": source.nbytes}


def matmul_torch(setting: Setting) -> Measure:
    torch = torch_cuda(setting)
    a, b = (torch.randn(FULL_N, FULL_N, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return lambda: {**time_torch([lambda: a @ b]), "flop": 2 * FULL_N**3}


def cases(setting: Setting) -> list[Case]:
    runs: dict[str, Callable[[Setting], Measure]] = {
        "copy, JAX": copy_jax,
        "read, JAX": read_jax,
        "matmul bf16 8192^3, JAX": matmul_jax,
        "copy, torch": copy_torch,
        "read, torch": read_torch,
        "matmul bf16 8192^3, torch": matmul_torch,
    }
    return [Case(name, functools.partial(run, setting)) for name, run in runs.items()]
