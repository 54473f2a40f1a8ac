"""PageArray: one array of the KV cache, as a backend describes it to whoever allocates it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class PageArray:
    """What one page of one layer takes of it, on one shard."""

    shape: tuple[int, ...]
    dtype: Any  # as it is stored
    head_axis: int | None  # of `shape`: what tensor parallelism splits; None where every shard holds the same

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize
