"""AttentionSpec: what a model asks of an attention backend."""

from __future__ import annotations

import dataclasses
from typing import Protocol


class HeadConfig(Protocol):
    """What AttentionSpec.of reads of a model's config."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What is asked of a backend. Heads are those of the whole model, before it is split over devices."""

    platform: str  # of the mesh's devices: cpu, gpu or tpu; never jax.default_backend(), we may compile for elsewhere
    num_heads: int
    num_kv_heads: int
    head_dim: int
    uses_soft_cap: bool = False
    uses_sinks: bool = False

    @staticmethod
    def of(config: HeadConfig, *, platform: str) -> AttentionSpec:
        return AttentionSpec(platform, config.num_heads, config.num_kv_heads, config.head_dim)
