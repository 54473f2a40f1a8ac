"""LoRA adapters of one matrix: checked against NumPy, and timed.

"own slots" are our kernels, "all slots" what XLA makes of products with the A and B of all, masked, which other platforms run.
Bytes are the least there are: inputs, results (read and written), and A and B of slots that have tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.case import Case, Measure, Setting
from benchmarks.device.compare import compare
from benchmarks.device.kernels import SMOKE_PLAN
from jaxserve.bench.timing import Plan, compile_calls
from jaxserve.kernels.pallas.gpu.low_rank import SlotTiles, add_low_rank
from jaxserve.models.adapters.low_rank import LowRank

Add = Callable[[jax.Array, jax.Array, jax.Array, LowRank], jax.Array]  # base, x, slots, adapters


@dataclasses.dataclass(frozen=True)
class AdapterShape:
    """Llama-3.1-8B's qkv by default. Each run of tokens has a slot drawn at random; every fifth has none."""

    num_tokens: int = 64
    size_in: int = 4096
    widths: tuple[int, ...] = (512, 128, 128)
    periods: int = 8
    num_slots: int = 8
    rank: int = 16
    run: int = 1
    dtype: str = "bfloat16"

    def slots(self, rng: np.random.Generator) -> np.ndarray:
        of_runs = rng.integers(0, self.num_slots, -(-self.num_tokens // self.run))
        of_runs[4::5] = -1
        return np.repeat(of_runs, self.run)[: self.num_tokens].astype(np.int32)

    def arrays(self, rng: np.random.Generator) -> tuple[jax.Array, jax.Array, LowRank]:
        """base [T, out], x [T, in], both of size 1 as is what is added, and the adapters."""
        size_out = self.periods * sum(self.widths)

        def normal(*shape: int, scale: float = 1.0) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape, np.float32) * scale, jnp.dtype(self.dtype))

        a = normal(self.num_slots, self.size_in, len(self.widths), self.rank, scale=self.size_in**-0.5)
        b = (normal(self.num_slots, self.rank, self.periods * width, scale=self.rank**-0.5) for width in self.widths)
        return normal(self.num_tokens, size_out), normal(self.num_tokens, self.size_in), LowRank(a, tuple(b), self.widths)


SMALL = AdapterShape(9, 64, (32, 32), 2, 3, 8)


def own_slots(setting: Setting) -> Add:
    def add(base: jax.Array, x: jax.Array, slots: jax.Array, adapters: LowRank) -> jax.Array:
        tiles = SlotTiles.of(slots, len(adapters.a))
        return add_low_rank(base, x, tiles, adapters.a, adapters.b, adapters.widths, interpret=setting.smoke)

    return add


def all_slots(base: jax.Array, x: jax.Array, slots: jax.Array, adapters: LowRank) -> jax.Array:
    return (base + adapters.product(x, slots)).astype(base.dtype)


def checks(setting: Setting) -> dict[str, Callable[[Setting], Measure]]:
    shapes = {
        "64 tokens, qkv": AdapterShape(),
        "one token": AdapterShape(num_tokens=1),
        "2000 tokens in runs": AdapterShape(num_tokens=2000, run=333),
        "2000 tokens, any": AdapterShape(num_tokens=2000),
        "down": AdapterShape(size_in=14336, widths=(4096,), periods=1),
        "gate and up": AdapterShape(widths=(14336, 14336), periods=1),
        "rank 8": AdapterShape(rank=8),
        "rank 40": AdapterShape(rank=40),
        "rank 256": AdapterShape(rank=256, num_tokens=1100),
        "64 slots": AdapterShape(num_tokens=300, num_slots=64),
        "Qwen2-0.5B's qkv": AdapterShape(size_in=896, widths=(448, 64, 64), periods=2),
        "float16": AdapterShape(dtype="float16"),
    }
    chosen = {"small": SMALL} if setting.smoke else shapes
    return {f"adapters, {name}": functools.partial(check_adapters, shape) for name, shape in chosen.items()}


def check_adapters(shape: AdapterShape, setting: Setting) -> Measure:
    seed = time.time_ns() % (1 << 31)
    rng = np.random.default_rng(seed)
    (base, x, adapters), slots = shape.arrays(rng), shape.slots(rng)
    want = _expected(base, x, slots, adapters)
    arguments = (base, x, jnp.asarray(slots), adapters)
    compiled = jax.jit(own_slots(setting)).lower(*arguments).compile()
    return lambda: {"seed": seed, **compare(lambda: compiled(*arguments), want).as_dict(shape.dtype)}


def _expected(base: jax.Array, x: jax.Array, slots: np.ndarray, adapters: LowRank) -> np.ndarray:
    """float32 [T, out]"""
    wide, all_a, *all_b = (np.asarray(array.astype(jnp.float32)) for array in (x, adapters.a, *adapters.b))
    out = np.asarray(base.astype(jnp.float32)).copy()
    for slot in set(slots[slots >= 0].tolist()):
        mine = slots == slot
        parts = [
            (wide[mine] @ all_a[slot, :, part] @ b[slot]).reshape(mine.sum(), -1, width)
            for part, (b, width) in enumerate(zip(all_b, adapters.widths, strict=True))
        ]
        out[mine] += np.concatenate(parts, axis=2).reshape(mine.sum(), -1)
    return out


def time_adapters(shape: AdapterShape, add: Add, setting: Setting) -> Measure:
    """All from the L2, which holds inputs and adapters."""
    rng = np.random.default_rng(0)
    (base, x, adapters), slots = shape.arrays(rng), shape.slots(rng)
    used, size_out = len(set(slots[slots >= 0].tolist())), base.shape[1]
    of_slot = shape.rank * (shape.size_in * len(shape.widths) + size_out)
    nbytes = 2 * (shape.num_tokens * (shape.size_in + 2 * size_out) + used * of_slot)
    plan = SMOKE_PLAN if setting.smoke else Plan()

    def call(index: jax.Array, base: jax.Array, operands: Any) -> jax.Array:
        return add(base, *operands)

    compiled = compile_calls(call, base, (x, jnp.asarray(slots), adapters), plan.calls(12 + nbytes / 3e6), plan)
    return lambda: {**compiled.time()[0].as_dict(), "bytes": nbytes}


def cases(setting: Setting) -> list[Case]:
    shapes = {
        f"{tokens} tokens, rank {rank}": AdapterShape(tokens, rank=rank, run=run)
        for tokens, run in ((1, 1), (64, 1), (2048, 512))
        for rank in (16, 64)
    }
    ways = {"own slots": own_slots(setting), "all slots": all_slots}
    return [
        Case(f"adapters, {name}, {way}", functools.partial(time_adapters, shape, add, setting))
        for name, shape in ({"small": SMALL} if setting.smoke else shapes).items()
        for way, add in ways.items()
    ]
