"""The TPU kernels, as jaxserve.bench.kernels times and tunes them.

A step is timed through its backend: what a layer's attention takes, the packing of queries and results included. Its extend
pass comes with a decode pass that has no rows, as in a server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxserve.bench.inputs import AttentionCase, AttentionInputs
from jaxserve.bench.runnable import Runnable, time_runnable
from jaxserve.bench.shapes import Shape
from jaxserve.bench.timing import Plan
from jaxserve.kernels.metadata import NO_PAGE, AttentionMetadata
from jaxserve.kernels.pallas.tpu import tuning as tpu_tuning
from jaxserve.kernels.pallas.tpu.backend import PallasTpuAttention, TpuKV
from jaxserve.kernels.pallas.tpu.layout import RowLayout
from jaxserve.kernels.pallas.tpu.tuning import PassConfig, PassShape, TpuConfig
from jaxserve.kernels.spec import AttentionSpec, Chip


@dataclasses.dataclass(frozen=True)
class TpuKernels:
    default_page_size: ClassVar[int] = PallasTpuAttention.default_page_size
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16",)

    chip: Chip
    interpret: Any = False  # pltpu.InterpretParams in tests
    plan: Plan = dataclasses.field(default_factory=lambda: Plan(repeats=5))

    def unsupported(self, shape: Shape) -> str | None:
        return PallasTpuAttention.supports(shape.spec(self.chip))

    def default_config(self, op: str, shape: Shape) -> PassConfig:
        return tpu_tuning.pass_config(_pass_shape(op, shape.spec(self.chip)), self.chip.kind)

    def tunable(self, op: str) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(PassConfig))

    def others(self, op: str, shape: Shape, default: PassConfig) -> Iterator[PassConfig]:
        return tpu_tuning.neighbours(_pass_shape(op, shape.spec(self.chip)), default, self.chip.kind)

    def time_case(self, op: str, case: AttentionCase, config: PassConfig) -> float:
        row_dim = RowLayout.of(case.head_dim).width
        return time_runnable(case, lambda inputs: self.runnable(op, case, inputs, config), self.plan, row_dim).us

    def runnable(self, op: str, case: AttentionCase, inputs: AttentionInputs, config: PassConfig) -> Runnable:
        """`inputs` with rows as wide as the TPU pool's."""
        backend = self._backend(op, case, config)
        metadata = jax.jit(lambda inputs: _metadata(backend, inputs, 1 if op == "decode" else None))(inputs)
        scales = inputs.scales
        cache = TpuKV(inputs.pool, None if scales is None else scales.reshape(scales.shape[0], -1, case.page_size))

        def call(index: jax.Array, out: jax.Array, operands: Any) -> jax.Array:
            q, cache, metadata, rotation, sinks = operands
            offset = rotation.offset(index)
            # Scaling and packing the queries would be moved out of the loop. This adds zero, which XLA does not know.
            q = q + jnp.minimum(offset, 0).astype(q.dtype)
            options: dict[str, Any] = {"sliding_window": case.sliding_window, "soft_cap": case.soft_cap, "sinks": sinks}
            return backend.ragged_paged_attention(q, cache, metadata, offset, scale=case.scale, **options)

        operands = (inputs.q, cache, metadata, inputs.rotation, inputs.sinks)
        return Runnable(call, jnp.zeros_like(inputs.q), operands)

    def _backend(self, op: str, case: AttentionCase, config: PassConfig) -> PallasTpuAttention:
        heads = (case.num_heads, case.num_kv_heads, case.head_dim)
        spec = AttentionSpec(self.chip, *heads, case.dtype, case.kv_dtype, case.page_size, (case.sliding_window,))
        return PallasTpuAttention(spec, self.interpret, self._both_passes(op, spec, config))

    def _both_passes(self, op: str, spec: AttentionSpec, config: PassConfig) -> TpuConfig:
        """`config` is that of `op`; the other pass has what it always has."""
        decode, extend = tpu_tuning.pass_shapes(spec)
        configs = (
            config if op == "decode" else tpu_tuning.pass_config(decode, self.chip.kind),
            config if op == "extend" else tpu_tuning.pass_config(extend, self.chip.kind),
        )
        return tpu_tuning.with_limits(decode, extend, *configs, self.chip.kind)


def _pass_shape(op: str, spec: AttentionSpec) -> PassShape:
    decode, extend = tpu_tuning.pass_shapes(spec)
    return decode if op == "decode" else extend


def _metadata(backend: PallasTpuAttention, inputs: AttentionInputs, decode_q_len: int | None) -> AttentionMetadata:
    """Of a step that writes nothing: keys and values are there already."""
    nowhere = jnp.full(inputs.q.shape[0], NO_PAGE, jnp.int32)
    step = AttentionMetadata(
        inputs.kv_lens, inputs.cu_q_lens, inputs.page_table, nowhere, jnp.zeros_like(nowhere), decode_q_len
    )
    return backend.plan(step)
