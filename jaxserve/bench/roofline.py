"""The least time that prompts and decode steps can take here: `aot.roofline` with the chip of this machine.

A chip that is not in the table of `aot.chips` has no roofline. A CPU's is measured: how fast a plain XLA program reads as many
bytes as the model's weights have, and multiplies matrices. What runs by other means than XLA may be faster than that.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.aot.chips import CHIPS, ChipSpec
from jaxserve.aot.roofline import Interconnect, ModelShard, Prediction, StepShape, StepWork, predict, step_work
from jaxserve.bench.steps import Chunk

# What a CPU's reads are measured with is as large as the weights, within these limits: caches count where they would.
_SMALLEST_READ, _LARGEST_READ = 1 << 20, 256 << 20
_MATRIX = 1024
_TRIES_S = 0.3


@dataclasses.dataclass(frozen=True)
class Roofline:
    chip: ChipSpec
    stages: tuple[ModelShard, ...]  # of a pipeline; of a model that is not divided, the one
    source: str  # where the chip's numbers are from, for a line of text

    @staticmethod
    def here(stages: Sequence[ModelShard]) -> Roofline | None:
        """None: this machine's chip is unknown."""
        device = jax.devices()[0]
        known = {chip.kind: chip for chip in CHIPS.values()}
        if device.device_kind in known:
            return Roofline(known[device.device_kind], tuple(stages), f"{device.device_kind}, its data sheet")
        if device.platform != "cpu":
            return None
        chip = measured_cpu(sum(shard.weight_bytes for shard in stages), stages[0].dtype)
        rates = f"{chip.hbm_bytes_per_s / 1e9:.1f} GB/s, {chip.bf16_flops_per_s / 1e9:.0f} GFLOP/s"
        return Roofline(chip, tuple(stages), f"this CPU, measured with plain XLA: {rates}")

    def prefill(self, steps: Sequence[Sequence[Chunk]]) -> Prediction:
        """Of all these steps, one after the other; a pipeline's stage computes one while the next computes the one before."""
        by_stage = [[_work_of(chunks, shard) for chunks in steps] for shard in self.stages]
        # Whichever stage all wait for: the first step comes to it through those before it, the last one has those behind it
        # left.
        paths = [
            [*(works[0] for works in by_stage[:stage]), *by_stage[stage], *(works[-1] for works in by_stage[stage + 1 :])]
            for stage in range(len(by_stage))
        ]
        return max(map(self._predict, paths), key=lambda path: path.step_s)

    def decode(self, num_rows: int, context_len: int) -> Prediction:
        """Of one step, after which each row has `context_len` tokens, through all stages: the next one needs its tokens."""
        shards = self.stages[0].config.attn_dp_size
        shape = StepShape(-(-num_rows // shards), 1, context_len, num_shards=shards)
        return self._predict([step_work(shard, shape) for shard in self.stages])

    def _predict(self, works: Sequence[StepWork]) -> Prediction:
        """What devices send to each other is not counted."""
        alone = Interconnect.of(self.chip, 1, 1)
        each = [predict(work, self.chip, self.stages[0].dtype, alone) for work in works]
        # Of each step the longer of the two, so that `step_s` is the sum of the steps' times.
        memory_s = sum(one.step_s for one in each if one.bound == "memory")
        compute_s = sum(one.step_s for one in each if one.bound == "compute")
        total = memory_s + compute_s
        return Prediction(total, compute_s, 0.0) if memory_s >= compute_s else Prediction(memory_s, total, 0.0)


def _work_of(chunks: Sequence[Chunk], shard: ModelShard) -> StepWork:
    """Of a step: the weights are read once, however many rows there are."""
    works = [
        step_work(shard, StepShape(1, chunk.end - chunk.start, chunk.end, int(chunk.end == chunk.prompt_len)))
        for chunk in chunks
    ]
    total = functools.reduce(_plus, works)
    tokens = sum(chunk.end - chunk.start for chunk in chunks)
    return dataclasses.replace(total, weight_bytes=step_work(shard, StepShape(1, tokens, tokens)).weight_bytes)


def _plus(one: StepWork, other: StepWork) -> StepWork:
    names = [field.name for field in dataclasses.fields(StepWork)]
    return StepWork(**{name: getattr(one, name) + getattr(other, name) for name in names})


def measured_cpu(num_bytes: int, dtype: str) -> ChipSpec:
    """This machine's CPU, as far as XLA uses it."""
    lines = min(max(num_bytes, _SMALLEST_READ), _LARGEST_READ) // (4 * _MATRIX)
    table, line = jnp.ones((lines, _MATRIX), jnp.float32), jnp.ones(_MATRIX, jnp.float32)
    copy_s = _best_s(jax.jit(lambda x: x + 1.0), table)
    product_s = _best_s(jax.jit(jnp.dot), table, line)
    square = jnp.ones((_MATRIX, _MATRIX), dtype)
    flops = 2 * _MATRIX**3 / _best_s(jax.jit(jnp.dot), square, square)
    return ChipSpec(
        name="cpu",
        kind=jax.devices()[0].device_kind,
        platform="cpu",
        devices_per_chip=1,
        hbm_bytes=0,
        hbm_bytes_per_s=max(2 * table.nbytes / copy_s, table.nbytes / product_s),
        bf16_flops_per_s=flops,
        int8_ops_per_s=flops,
        fp8_flops_per_s=flops,
        float32_flops_per_s=flops,
        scratchpad_bytes=0,
        link_bytes_per_s=0.0,
    )


def _best_s(program: Callable[..., Any], *arrays: jax.Array) -> float:
    jax.block_until_ready(program(*arrays))
    best, ends_s = float("inf"), time.perf_counter() + _TRIES_S
    while (started_s := time.perf_counter()) < ends_s:
        jax.block_until_ready(program(*arrays))
        best = min(best, time.perf_counter() - started_s)
    return best
