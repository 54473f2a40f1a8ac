"""Declare: makes the parameters of the blocks, as descriptions. Knows checkpoints' tensors and our layout, and no block kind.

Our layout: matrices are [in, out]. Projections that read the same input are one matrix ("fused"), whose columns are dealt out
so that a shard of them is what one device needs. Layers are separate arrays: XLA on CPU would copy a layer's weights out of a
stacked array in every step, which makes a step of a larger model 2.5 times as slow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from jaxserve.models.arrays import ArrayInfo, KVGroups, Rows, Source, Stacked
from jaxserve.models.blocks.norm import ScaleAndBias
from jaxserve.models.native_weight import NativeWeight
from jaxserve.models.quantized_weight import Int8Weight
from jaxserve.models.specs import NormSpec
from jaxserve.models.weight import PlainWeight, Weight


@dataclasses.dataclass(frozen=True)
class Declare:
    """For one hidden size, type and device count. Names are those of Hugging Face checkpoints."""

    hidden_size: int
    dtype: np.dtype[Any]
    tp_size: int
    quantization: str | None = None
    native_products: bool = False

    def weight(self, matrix: ArrayInfo) -> Weight:
        """How a matrix is stored and multiplied: the one place that chooses."""
        if self.quantization is None:
            return NativeWeight(matrix) if self.native_products else PlainWeight(matrix)
        assert self.quantization == "int8wo", self.quantization
        return Int8Weight.of(matrix)

    def vector(self, name: str, size: int, axis: str, rows: Sequence[Rows] = ()) -> nnx.Param[Any]:
        """`rows`: the order its elements come in, if it is another than the checkpoint's."""
        source = Source((name,), ((size,),), tuple(rows) or (Rows(0, 0, size),), transposed=False)
        return nnx.Param(ArrayInfo((size,), self.dtype, (axis,), source, std=0.02))

    def norm(
        self, name: str, spec: NormSpec, size: int | None = None, axis: str = "hidden", rows: Sequence[Rows] = ()
    ) -> nnx.Param[Any]:
        """Of the hidden state unless `size` and `axis` say what of."""
        size = size or self.hidden_size
        described = self.vector(name, size, axis, rows).get_value()
        scale = dataclasses.replace(described, mean=0.0 if spec.counts_from_one else 1.0)
        if not spec.bias:
            return nnx.Param(scale)
        bias = self.vector(f"{name.removesuffix('.weight')}.bias", size, axis, rows).get_value()
        return nnx.Param(ScaleAndBias(scale, bias))

    def matrix(self, name: str, size_in: int, axis_in: str) -> nnx.Param[Any]:
        """A projection back to the hidden state."""
        size_out = self.hidden_size
        source = Source((name,), ((size_out, size_in),), (Rows(0, 0, size_out),), transposed=True)
        return nnx.Param(
            self.weight(ArrayInfo((size_in, size_out), self.dtype, (axis_in, "hidden"), source, std=size_in**-0.5))
        )

    def fused_matrix(
        self, sizes: Mapping[str, int], rows: Sequence[Rows], axis: str, groups: KVGroups | None = None
    ) -> nnx.Param[Any]:
        """Several projections of the hidden state as one. `sizes`: tensor -> its columns; `rows`: the order they come in."""
        hidden, size_out = self.hidden_size, sum(row.count for row in rows)
        source = Source(tuple(sizes), tuple((size, hidden) for size in sizes.values()), tuple(rows), transposed=True)
        info = ArrayInfo((hidden, size_out), self.dtype, ("hidden", axis), source, std=hidden**-0.5, groups=groups)
        return nnx.Param(self.weight(info))

    def expert_matrices(
        self, parts: Sequence[Mapping[str, int]], size_in: int, axes: tuple[str, str], fused: str
    ) -> nnx.Param[Any]:
        """A matrix per expert, [experts, in, out]. `parts`: per expert, tensor -> its columns; `fused`: the one tensor that
        checkpoints may have in their place."""
        sources = tuple(
            Source(
                tuple(sizes),
                tuple((size, size_in) for size in sizes.values()),
                tuple(Rows(index, 0, size) for index, size in enumerate(sizes.values())),
                transposed=True,
            )
            for sizes in parts
        )
        shape = (len(parts), size_in, size_out := sum(parts[0].values()))
        all_rows = (Rows(0, 0, size_out),)
        stack = tuple(
            Source((fused,), ((len(parts), size_out, size_in),), all_rows, transposed=True, matrix=expert)
            for expert in range(len(parts))
        )
        info = ArrayInfo(shape, self.dtype, ("experts", *axes), Stacked(sources, stack), std=size_in**-0.5)
        return nnx.Param(self.weight(info))

    def expert_vectors(self, name: str, num_experts: int, size: int, axis: str) -> nnx.Param[Any]:
        """A vector per expert, [experts, size], of one tensor."""
        rows = (Rows(0, 0, size),)
        source = Source((name,), ((num_experts, size),), rows, transposed=True, in_first=True)
        return nnx.Param(ArrayInfo((num_experts, size), self.dtype, ("experts", axis), source, std=0.02))

    def router(self, name: str, num_experts: int) -> nnx.Param[Any]:
        """Of the hidden state, whole on every device and never quantized: a rounded score may choose another expert."""
        source = Source((name,), ((num_experts, self.hidden_size),), (Rows(0, 0, num_experts),), transposed=True)
        shape = (self.hidden_size, num_experts)
        return nnx.Param(PlainWeight(ArrayInfo(shape, self.dtype, ("hidden", "routes"), source, std=self.hidden_size**-0.5)))

    def fused_bias(
        self, sizes: Mapping[str, int], rows: Sequence[Rows], axis: str, groups: KVGroups | None = None
    ) -> nnx.Param[Any]:
        source = Source(tuple(sizes), tuple((size,) for size in sizes.values()), tuple(rows), transposed=False)
        size_out = sum(row.count for row in rows)
        return nnx.Param(ArrayInfo((size_out,), self.dtype, (axis,), source, std=0.02, groups=groups))
