"""Declare: makes the parameters of the blocks, as descriptions. Knows checkpoints' tensors and our layout, and no block kind.

Our layout: matrices are [in, out]. Projections that read the same input are one matrix ("fused"), whose columns are dealt out
so that a shard of them is what one device needs. Layers are separate arrays: XLA on CPU would copy a layer's weights out of a
stacked array in every step, which makes a step of a larger model 2.5 times as slow.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from jaxserve.models.arrays import ArrayInfo, Given, KVGroups, Rows, Source, Stacked
from jaxserve.models.blocks.norm import ScaleAndBias
from jaxserve.models.expert_placement import ExpertSlots
from jaxserve.models.native_weight import NativeWeight
from jaxserve.models.quantized_weight import Int8Weight
from jaxserve.models.specs import NormSpec
from jaxserve.models.weight import PlainWeight, Weight


@dataclasses.dataclass(frozen=True)
class Declare:
    """For one hidden size, type and `tp_size` devices. Names are those of Hugging Face checkpoints."""

    hidden_size: int
    dtype: np.dtype[Any]
    tp_size: int
    quantization: str | None = None
    native_products: bool = False
    expert_slots: ExpertSlots | None = None  # of the layer; None: whole experts in order
    attn_dp_size: int = 1  # groups of devices that have attention of their own

    @property
    def attn_tp_size(self) -> int:
        """Devices over which attention is divided."""
        return self.tp_size // self.attn_dp_size

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

    def slots_of(self, num_experts: int) -> ExpertSlots:
        return self.expert_slots or ExpertSlots(tuple(range(num_experts)), self.tp_size)

    def expert_matrices(
        self, parts: Sequence[Mapping[str, int]], size_in: int, axes: tuple[str, str], fused: str
    ) -> nnx.Param[Any]:
        """A matrix in each slot of experts, [slots, in, out]. `parts`: per expert, tensor -> its columns; `fused`: the one
        tensor that checkpoints may have in their place."""
        slots = self.slots_of(len(parts))
        cuts_out = axes[1] != "hidden"  # whether slices are of [out, in]'s rows
        cut_in, cut_out = (1, slots.slices) if cuts_out else (slots.slices, 1)
        size_out = sum(parts[0].values())

        def own(expert: int, part: int) -> Source:
            sizes, column = parts[expert], 0 if cuts_out else part * size_in // cut_in
            rows = (_slice(index, 0, size, part % cut_out, cut_out) for index, size in enumerate(sizes.values()))
            shapes = tuple((size, size_in) for size in sizes.values())
            return Source(tuple(sizes), shapes, tuple(rows), transposed=True, first_column=column)

        def of_stack(expert: int, part: int) -> Source:
            source, starts = own(expert, part), itertools.accumulate(parts[0].values(), initial=0)
            rows = tuple(Rows(0, start + row.start, row.count) for start, row in zip(starts, source.rows, strict=False))
            shapes = ((len(parts), size_out, size_in),)
            return dataclasses.replace(source, names=(fused,), shapes=shapes, rows=rows, matrix=expert)

        stacked = Stacked(*(tuple(itertools.starmap(source, slots.by_device)) for source in (own, of_stack)))
        shape, std = (len(slots.by_device), size_in // cut_in, size_out // cut_out), size_in**-0.5
        return nnx.Param(
            self.weight(ArrayInfo(shape, self.dtype, ("experts", *axes), stacked, std=std, slots=self.expert_slots))
        )

    def expert_vectors(self, name: str, num_experts: int, sizes: Sequence[int], axis: str) -> nnx.Param[Any]:
        """A vector in each slot of experts, [slots, sum of sizes], of one tensor. What is added to the hidden state has only
        the first slice."""
        slots, size = self.slots_of(num_experts), sum(sizes)
        is_cut = axis != "hidden"

        def source(expert: int, part: int) -> Source:
            starts = itertools.accumulate(sizes, initial=0)
            rows = tuple(_slice(0, *run, part, slots.slices) for run in zip(starts, sizes, strict=False))
            whole = (Rows(0 if part == 0 else None, 0, size),)
            return Source((name,), ((num_experts, size),), rows if is_cut else whole, transposed=False, matrix=expert)

        stacked = Stacked((), tuple(itertools.starmap(source, slots.by_device)))
        shape = (len(slots.by_device), size // slots.slices if is_cut else size)
        return nnx.Param(ArrayInfo(shape, self.dtype, ("experts", axis), stacked, std=0.02, slots=self.expert_slots))

    def slot_table(self) -> nnx.Param[Any] | None:
        """`ExpertSlots.table`, whole on every device."""
        table = None if self.expert_slots is None else self.expert_slots.table
        if table is None:
            return None
        given = Given(tuple(table.ravel().tolist()))
        return nnx.Param(ArrayInfo(table.shape, table.dtype, ("routes", "copies"), given))

    def router(self, name: str, num_experts: int) -> nnx.Param[Any]:
        """Of the hidden state, whole on every device and never quantized: a rounded score may choose another expert."""
        source = Source((name,), ((num_experts, self.hidden_size),), (Rows(0, 0, num_experts),), transposed=True)
        shape = (self.hidden_size, num_experts)
        return nnx.Param(PlainWeight(ArrayInfo(shape, self.dtype, ("hidden", "routes"), source, std=self.hidden_size**-0.5)))

    def conv(self, name: str, channels: int, size: int, axis: str, rows: Sequence[Rows]) -> nnx.Param[Any]:
        """A convolution per channel, [size, channels that `rows` name], the newest token's factor last."""
        source = Source((name,), ((channels, 1, size),), tuple(rows), transposed=True, of_conv=True)
        shape = (size, sum(row.count for row in rows))
        return nnx.Param(ArrayInfo(shape, self.dtype, ("taps", axis), source, std=size**-0.5))

    def fused_bias(
        self, sizes: Mapping[str, int], rows: Sequence[Rows], axis: str, groups: KVGroups | None = None
    ) -> nnx.Param[Any]:
        source = Source(tuple(sizes), tuple((size,) for size in sizes.values()), tuple(rows), transposed=False)
        size_out = sum(row.count for row in rows)
        return nnx.Param(ArrayInfo((size_out,), self.dtype, (axis,), source, std=0.02, groups=groups))


def _slice(tensor: int, start: int, size: int, part: int, parts: int) -> Rows:
    """Number `part` of as many rows each, of `size` rows from `start` on."""
    return Rows(tensor, start + part * size // parts, size // parts)
