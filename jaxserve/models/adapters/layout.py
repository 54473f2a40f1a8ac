"""AdapterLayout: which matrices of a model adapters may change, the arrays of their slots, and how an adapter goes into one.

All of it follows from the descriptions that load checkpoints: which tensors a matrix is made of, in which order their rows come
and how it is sharded. An adapter is sharded as its base.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxserve.models.adapters import peft_files
from jaxserve.models.adapters.low_rank import AdapterSlots, LowRank
from jaxserve.models.arrays import LOGICAL_TO_MESH, ArrayInfo, Derived, Rows, Source
from jaxserve.models.decoder import ParamTree
from jaxserve.models.quantized_weight import Int8Weight
from jaxserve.models.safetensors_files import spellings
from jaxserve.models.weight import PlainWeight

ALL_MODULES = "all"  # among the targets: every module that adapters can change
_SUFFIX = ".weight"


@dataclasses.dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix [in, out] of the model, made of P of a checkpoint's [out, in]. An embedding is one of [vocabulary, hidden]."""

    modules: tuple[str, ...]  # names of the P modules, as Transformers and PEFT have them
    shapes: tuple[tuple[int, int], ...]  # of each [out, in]
    columns: tuple[tuple[Rows, ...], ...]  # of each, the order of its rows in our columns
    widths: tuple[int, ...]  # see LowRank
    size_in: int
    axis_in: str  # logical
    axis_out: str

    @staticmethod
    def of(info: ArrayInfo) -> AdaptedMatrix | None:
        """None for what adapters cannot change: routers, experts, matrices whose columns are not periods of their parts."""
        source = info.source
        if not isinstance(source, Source) or not source.transposed or len(info.shape) != 2 or "routes" in info.logical_axes:
            return None
        parts = len(source.names)
        if parts == 1:
            return AdaptedMatrix.of_one(info, source.names[0], source)
        runs = [(tensor, sum(row.count for row in rows)) for tensor, rows in _runs(source.rows)]
        if [tensor for tensor, _ in runs] != list(range(parts)) * (len(runs) // parts) or runs != runs[:parts] * (
            len(runs) // parts
        ):
            return None
        return AdaptedMatrix(
            modules=tuple(name.removesuffix(_SUFFIX) for name in source.names),
            shapes=tuple((shape[0], shape[1]) for shape in source.shapes),
            columns=tuple(tuple(row for row in source.rows if row.tensor == part) for part in range(parts)),
            widths=tuple(width for _, width in runs[:parts]),
            size_in=info.shape[0],
            axis_in=info.logical_axes[0],
            axis_out=info.logical_axes[1],
        )

    @staticmethod
    def of_one(info: ArrayInfo, name: str, source: Source) -> AdaptedMatrix:
        """Made of one, the whole of it or with rows of zeros behind."""
        size_in, size_out = info.shape
        shape = source.shapes[0][0], source.shapes[0][1]
        axis_in, axis_out = info.logical_axes
        module = name.removesuffix(_SUFFIX)
        return AdaptedMatrix((module,), (shape,), (source.rows,), (size_out,), size_in, axis_in, axis_out)

    @staticmethod
    def of_embedding(table: ArrayInfo) -> AdaptedMatrix:
        """PEFT has A of it as [rank, vocabulary], B as [hidden, rank]."""
        assert isinstance(table.source, Source)
        (vocab_size, hidden), (module,) = table.source.shapes[0], (name.removesuffix(_SUFFIX) for name in table.source.names)
        rows = (Rows(0, 0, hidden),)
        return AdaptedMatrix((module,), ((hidden, vocab_size),), (rows,), (hidden,), table.shape[0], *table.logical_axes)

    @staticmethod
    def of_tied_head(table: ArrayInfo, name: str) -> AdaptedMatrix:
        """An embedding as an output head, which is a module of its own."""
        source = table.source
        assert isinstance(source, Source)
        info = dataclasses.replace(table, shape=table.shape[::-1], logical_axes=table.logical_axes[::-1])
        return AdaptedMatrix.of_one(info, name, source)

    def arrays(self, num_slots: int, rank: int, dtype: np.dtype[Any]) -> LowRank:
        """Of ShapeDtypeStructs."""
        sizes = [sum(row.count for row in rows) for rows in self.columns]
        a = jax.ShapeDtypeStruct((num_slots, self.size_in, len(sizes), rank), dtype)
        return LowRank(a, tuple(jax.ShapeDtypeStruct((num_slots, rank, size), dtype) for size in sizes), self.widths)

    @property
    def specs(self) -> LowRank:
        """Of PartitionSpecs."""
        a = PartitionSpec(None, LOGICAL_TO_MESH[self.axis_in], None, None)
        return LowRank(a, (PartitionSpec(None, None, LOGICAL_TO_MESH[self.axis_out]),) * len(self.modules), self.widths)

    def filled(self, adapter: Mapping[str, peft_files.LowRank], rank: int, dtype: np.dtype[Any]) -> LowRank:
        """What goes into one slot: a [in, P, R], b [R, columns] of NumPy, the adapter's scale in b."""
        a = np.zeros((self.size_in, len(self.modules), rank), dtype)
        b = tuple(np.zeros((rank, sum(row.count for row in rows)), dtype) for rows in self.columns)
        for part, module in enumerate(self.modules):
            if module not in adapter:
                continue
            change = adapter[module]
            own = len(change.a)
            a[: change.a.shape[1], part, :own] = change.a.astype(np.float32).T
            scaled, to = change.b.astype(np.float32) * change.scale, 0
            for row in self.columns[part]:
                if row.tensor is not None:  # else columns of zeros, which fill up a vocabulary
                    b[part][:own, to : to + row.count] = scaled[row.start :: row.step][: row.count].T
                to += row.count
        return LowRank(a, b, self.widths)


@dataclasses.dataclass(frozen=True)
class AdapterLayout:
    """Of a model, or of a stage of it. Embedding and output head are changed only if they are asked for by name: the vocabulary
    is large."""

    embed: AdaptedMatrix | None
    lm_head: AdaptedMatrix | None
    layers: Mapping[int, Mapping[str, AdaptedMatrix]]  # by place in the layer's tree of weights: "attn.qkv"
    num_slots: int
    rank: int  # the largest
    dtype: np.dtype[Any]

    @staticmethod
    def of(arrays: ParamTree, *, num_slots: int, rank: int, dtype: Any, targets: Collection[str]) -> AdapterLayout:
        """`arrays`: descriptions of the weights; `targets`: last parts of modules' names, or ALL_MODULES among them."""
        chosen = set(targets)
        layers = {
            layer: {
                name: matrix
                for name, matrix in _matrices(tree)
                if ALL_MODULES in chosen or any(_last(module) in chosen for module in matrix.modules)
            }
            for layer, tree in arrays["layers"].items()
        }
        embed, lm_head = (matrix if matrix and _last(matrix.modules[0]) in chosen else None for matrix in _ends(arrays))
        return AdapterLayout(embed, lm_head, layers, num_slots, rank, np.dtype(dtype))

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """Name -> [out, in] of all modules that an adapter may change."""
        ends = [end for end in (self.embed, self.lm_head) if end is not None]
        matrices = itertools.chain(ends, *(of_layer.values() for of_layer in self.layers.values()))
        return {module: shape for one in matrices for module, shape in zip(one.modules, one.shapes, strict=True)}

    def shapes(self) -> AdapterSlots:
        """The arrays of all slots, as ShapeDtypeStructs."""
        return self._map(lambda matrix: matrix.arrays(self.num_slots, self.rank, self.dtype))

    def specs(self) -> AdapterSlots:
        return self._map(lambda matrix: matrix.specs)

    def slot_shapes(self) -> AdapterSlots:
        """Of what goes into one slot."""

        def one(matrix: AdaptedMatrix) -> LowRank:
            all_slots = matrix.arrays(self.num_slots, self.rank, self.dtype)
            a = jax.ShapeDtypeStruct(all_slots.a.shape[1:], self.dtype)
            b = tuple(jax.ShapeDtypeStruct(array.shape[1:], self.dtype) for array in all_slots.b)
            return LowRank(a, b, all_slots.widths)

        return self._map(one)

    def slot_specs(self) -> AdapterSlots:
        """Of what goes into one slot."""

        def one(specs: LowRank) -> LowRank:
            return LowRank(PartitionSpec(*specs.a[1:]), tuple(PartitionSpec(*b[1:]) for b in specs.b), specs.widths)

        return self._map(lambda matrix: one(matrix.specs))

    def filled(self, adapter: peft_files.PeftAdapter) -> AdapterSlots:
        """What goes into one slot, as NumPy arrays. The adapter fits (`check`)."""
        return self._map(lambda matrix: matrix.filled(adapter.modules, self.rank, self.dtype))

    def _map(self, make: Callable[[AdaptedMatrix], LowRank]) -> AdapterSlots:
        layers = {layer: {name: make(one) for name, one in of_layer.items()} for layer, of_layer in self.layers.items()}
        return AdapterSlots(layers, *(end and make(end) for end in (self.embed, self.lm_head)))


def write_slot(pool: Any, slot: jax.Array, filled: Any) -> Any:
    """The arrays of all slots with `filled` in number `slot`, int32 []."""
    return jax.tree.map(lambda into, one: into.at[slot].set(one), pool, filled)


def as_named_here(adapter: peft_files.PeftAdapter, modules: Collection[str]) -> peft_files.PeftAdapter:
    """With the names of `modules`. PEFT takes those of the base, which was saved without a head, perhaps, or as an encoder."""
    names = {spelling: name for name in modules for spelling in spellings(name)} | {name: name for name in modules}
    return dataclasses.replace(adapter, modules={names.get(name, name): change for name, change in adapter.modules.items()})


def check(adapter: peft_files.PeftAdapter, modules: Mapping[str, tuple[int, int]], rank: int, path: str) -> None:
    """ValueError with a sentence if the adapter is of another model, or has no room in a slot. `modules`: of the whole model,
    those that an adapter may change."""
    for name, change in adapter.modules.items():
        shape = (len(change.b), change.a.shape[1])
        if name not in modules:
            raise ValueError(
                f"The adapter {path} changes {name}, which this server cannot: it is not a module of the model, or not one of "
                "--lora-target-modules."
            )
        if shape != modules[name]:
            (size_out, size_in), (model_out, model_in) = shape, modules[name]
            raise ValueError(
                f"The adapter {path} is of another model: its {name} goes from {size_in} to {size_out}, that of the served one "
                f"from {model_in} to {model_out}."
            )
        if len(change.a) > rank:
            raise ValueError(f"The adapter {path} has rank {len(change.a)} in {name}; --max-lora-rank is {rank}.")


def check_targets(arrays: ParamTree, targets: Collection[str]) -> None:
    """ValueError with a sentence for a target that no module of the whole model has."""
    matrices = [matrix for tree in arrays["layers"].values() for _, matrix in _matrices(tree)]
    matrices += [end for end in _ends(arrays) if end is not None]
    names = {_last(module) for matrix in matrices for module in matrix.modules}
    if unknown := sorted(set(targets) - names - {ALL_MODULES}):
        raise ValueError(
            f"--lora-target-modules: the model has no module {unknown[0]} that an adapter could change; it has "
            f"{', '.join(sorted(names))}."
        )


def _matrices(tree: Any, name: str = "") -> Iterator[tuple[str, AdaptedMatrix]]:
    """Of a layer's tree of descriptions."""
    if isinstance(tree, dict):
        for key, below in tree.items():
            yield from _matrices(below, f"{name}.{key}" if name else str(key))
        return
    info = tree.matrix if isinstance(tree, PlainWeight) else tree.values if isinstance(tree, Int8Weight) else None
    if info is None:
        return
    matrix = AdaptedMatrix.of(info.source.base if isinstance(info.source, Derived) else info)
    if matrix is not None:
        yield name, matrix


def _ends(arrays: ParamTree) -> tuple[AdaptedMatrix | None, AdaptedMatrix | None]:
    """Embedding and output head, as far as the stage has them. What is tied is in both ends."""
    table, embed, lm_head = arrays.get("embed"), None, None
    if isinstance(table, ArrayInfo):
        embed = AdaptedMatrix.of_embedding(table)
    if "lm_head" in arrays:
        ((_, lm_head),) = _matrices(arrays["lm_head"], "lm_head")
    elif table is not None and "final_norm" in arrays:
        lm_head = AdaptedMatrix.of_tied_head(table, "lm_head")
    return embed, lm_head


def _runs(rows: Collection[Rows]) -> list[tuple[int | None, list[Rows]]]:
    """Neighbours of one tensor together."""
    return [(tensor, list(of_tensor)) for tensor, of_tensor in itertools.groupby(rows, key=lambda row: row.tensor)]


def _last(module: str) -> str:
    return module.rpartition(".")[2]
