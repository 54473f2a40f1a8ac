"""The GPU kernels, as jaxserve.bench.kernels times and tunes them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jaxserve.bench.attention import time_attention
from jaxserve.bench.inputs import AttentionCase
from jaxserve.bench.shapes import Shape
from jaxserve.bench.timing import Plan
from jaxserve.kernels import tuning
from jaxserve.kernels.pallas.gpu.attention import PallasGpuAttention, kernel_dim
from jaxserve.kernels.spec import QUANTIZED_DTYPES, Chip

# Fields and the values that are tried. What needs too many registers fails to compile and drops out.
GRIDS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "decode": {"streams": (1, 2), "stages": (2, 3, 4), "block_kv": (64, 128), "min_tiles": (1, 2, 4)},
    "extend": {"block_kv": (64, 128), "num_stages": (2, 3), "max_heads_per_tile": (4, 16)},
}


@dataclasses.dataclass(frozen=True)
class GpuKernels:
    default_page_size: ClassVar[int] = PallasGpuAttention.default_page_size
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16")

    chip: Chip

    def unsupported(self, shape: Shape) -> str | None:
        spec = shape.spec(self.chip)
        if reason := PallasGpuAttention.supports(spec):
            return reason
        if kernel_dim(spec) != spec.head_dim:
            return f"no kernel has heads of {spec.head_dim}; a server fills them up: time them as heads of {kernel_dim(spec)}."
        return None

    def default_config(self, op: str, shape: Shape) -> Any:
        make = tuning.decode_config if op == "decode" else tuning.extend_config
        return make(self.chip.kind, shape.kernel_shape)

    def tunable(self, op: str) -> tuple[str, ...]:
        return tuple(GRIDS[op])

    def others(self, op: str, shape: Shape, default: Any) -> Iterator[Any]:
        sizes = (shape.head_dim, shape.head_dim, shape.kv_dtype in QUANTIZED_DTYPES)
        for values in itertools.product(*GRIDS[op].values()):
            config = dataclasses.replace(default, **dict(zip(GRIDS[op], values, strict=True)))
            if config != default and config.problem(*sizes) is None:
                yield config

    def time_case(self, op: str, case: AttentionCase, config: Any) -> float:
        return time_attention(op, case, config, Plan(repeats=5)).us
