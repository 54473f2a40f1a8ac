"""Shapes that kernels are timed and tuned for, and the steps that stand for a server's usual ones."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from jaxserve.bench.inputs import AttentionCase, decode_case
from jaxserve.kernels import tuning
from jaxserve.kernels.spec import AttentionSpec, Chip
from jaxserve.models import ModelConfig

_DECODE_STEPS = ((64, 4096), (8, 2048), (256, 1024))
_EXTEND_STEPS = (((4096, 4096),), ((2048, 16384),), ((512, 512), (100, 1124), (1436, 1436)))


class Device(Protocol):
    """What a model's shapes depend on."""

    @property
    def chip(self) -> Chip: ...
    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of weights, as they are served; the first stands for all others."""
        ...


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads of one shard, pages, and types."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    sliding_window: int | None = None

    @staticmethod
    def of_model(config: ModelConfig, device: Device, *, tp_size: int, page_size: int, kv_dtype: str) -> list[Shape]:
        """One per kind of layer."""
        dtype = config.dtype if config.dtype in device.dtypes else device.dtypes[0]
        spec = AttentionSpec.of(config, chip=device.chip, tp_size=tp_size, dtype=dtype, kv_dtype=kv_dtype)
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        return [Shape(*heads, page_size, dtype, spec.kv_dtype, window) for window in spec.windows]

    def steps(self) -> dict[str, list[AttentionCase]]:
        """Op -> typical steps."""
        fields = dataclasses.asdict(self)
        decode = [decode_case(batch, context, **fields, head_dim_v=self.head_dim) for batch, context in _DECODE_STEPS]
        extend = [AttentionCase(rows, **fields, head_dim_v=self.head_dim) for rows in _EXTEND_STEPS]
        return {"decode": decode, "extend": extend}

    def spec(self, chip: Chip) -> AttentionSpec:
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        return AttentionSpec(chip, *heads, self.dtype, self.kv_dtype, self.page_size, (self.sliding_window,))

    @property
    def kernel_shape(self) -> tuning.KernelShape:
        heads = (self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim)
        return tuning.KernelShape(*heads, self.page_size, self.kv_dtype)

    def key(self, op: str) -> str:
        return self.kernel_shape.key(op)
