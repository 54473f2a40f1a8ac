"""ArrayInfo: one array of a model, described: shape, type, logical axes, and where its elements come from.

The loader, the dummy weights, the Orbax reader and the shardings all walk trees of ArrayInfo, which the blocks declare.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxserve.models.expert_placement import ExpertSlots

DATA_AXIS, TENSOR_AXIS = "data", "tensor"
ALL_AXES = (DATA_AXIS, TENSOR_AXIS)

# The one table from logical axes to mesh axes; None: not sharded. What attention has is the same on every line along "data",
# which is longer than 1 with attention by data parallelism. kv_groups: columns of the fused q, k, v matrix; gate_up: of
# the fused gate and up matrix; experts: slots of experts; expert_mlp, expert_gate_up: columns inside of one, or of a slice of
# it; every_head: all heads, on every device; taps: of a convolution; latent: of queries, or of keys and values; rows: of a
# small table; pooled: of vectors of texts, before and behind the matrices that they go through.
LOGICAL_TO_MESH: dict[str, str | tuple[str, ...] | None] = {
    "vocab": ALL_AXES,
    "heads": TENSOR_AXIS,
    "kv_groups": TENSOR_AXIS,
    "gate_up": ALL_AXES,
    "mlp": ALL_AXES,
    "experts": ALL_AXES,
    "expert_mlp": None,
    "expert_gate_up": None,
    "routes": None,
    "copies": None,
    "every_head": None,
    "latent": None,
    "hidden": None,
    "head_dim": None,
    "taps": None,
    "rows": None,
    "pooled": None,
}


@dataclasses.dataclass(frozen=True)
class Rows:
    """`count` rows of tensor number `tensor` of a Source, each `step` behind the one before; None: rows of zeros."""

    tensor: int | None
    start: int
    count: int
    step: int = 1


@dataclasses.dataclass(frozen=True)
class Source:
    """How an array comes out of a Hugging Face checkpoint: rows of tensors one below the other, transposed if it is a matrix.

    `names[i]` has the shape `shapes[i]`, [out] or [out, in]. Where it is a stack, `matrix` is the number of the one that is
    meant. Rows are those of [out, in] even where files have [in, out] (`in_first`).
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rows: tuple[Rows, ...]
    transposed: bool
    matrix: int | None = None
    in_first: bool = False
    unit_rows: bool = False  # each row, of all columns, is divided by its length
    first_column: int = 0  # of [out, in], of those that are meant
    of_conv: bool = False  # files have [out, 1, in]: of a convolution per channel


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Matrices [experts, in, out], each out of tensors of its own, or out of one that holds all of them, `fused`.

    Without `parts` all checkpoints have that one.
    """

    parts: tuple[Source, ...]
    fused: tuple[Source, ...]


@dataclasses.dataclass(frozen=True)
class Derived:
    """How an array is computed while weights are loaded, from one that checkpoints have (quantized values, their scales).

    `compute` is a module-level function: it is jitted once for all arrays of a shape. It gets the whole array `base`
    describes, sharded, in the layout for the mesh, and XLA moves what must be moved.
    """

    base: ArrayInfo
    compute: Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Given:
    """Numbers that no checkpoint has, row by row."""

    values: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class KVGroups:
    """What the columns of a fused q, k, v matrix are, before key/value heads are repeated."""

    num_kv_heads: int
    group_size: int
    head_dim: int


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """One array. `mean` and `std` are what dummy weights are drawn with. `groups` goes with the axis kv_groups, `slots` with
    the axis experts, where it is not all experts in order."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    logical_axes: tuple[str, ...]
    source: Source | Stacked | Derived | Given
    mean: float = 0.0
    std: float = 0.0
    groups: KVGroups | None = None
    slots: ExpertSlots | None = None

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.logical_axes), (self.shape, self.logical_axes)
        assert (self.groups is not None) == ("kv_groups" in self.logical_axes), self
        assert not isinstance(self.source, Derived) or isinstance(self.source.base.source, Source | Stacked), self

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*(LOGICAL_TO_MESH[axis] for axis in self.logical_axes))

    @property
    def anonymous(self) -> ArrayInfo:
        """Without what its elements are: equal for all arrays that one program can lay out."""
        return dataclasses.replace(self, source=Source((), (), (), False), mean=0.0, std=1.0)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize
