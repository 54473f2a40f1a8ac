"""TensorUpdate: a model's tree of parameters, made of tensors that somebody hands over as arrays, on the devices.

What `loading` does with files: of each stored array every device gets its part, in the layout for the mesh. Here one program
for each kind of array does it on all devices of the mesh, however the given arrays are divided; arrays of other devices are
brought over first. Matrices of experts that are no single tensor in the right order go to the device of their slot, each by
itself.

Nothing that is made shares memory with what was given.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.arrange import are_alike, is_in_order
from jaxserve.models.array_batch import ArrayBatch, Making, make_all
from jaxserve.models.array_making import Compute, SlotArray, WholeArray
from jaxserve.models.array_programs import ArrayPrograms, Program
from jaxserve.models.arrays import ALL_AXES, ArrayInfo, Derived, Given, Source, Stacked
from jaxserve.models.assembly import derive, give
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import ParamTree, abstract_params
from jaxserve.models.given_tensors import ExpectedTensors, GivenTensor, variants
from jaxserve.models.names import map_named, stored_arrays, stored_name
from jaxserve.models.redistribute import Block, bring


class TensorUpdate:
    """Of one stage; knows no engine. Programs are kept: another update compiles nothing."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: Any) -> None:
        self._mesh = mesh
        self._arrays = abstract_params(config, dtype, mesh.size)
        self._stored = stored_arrays(self._arrays)
        of_model = abstract_params(config.replace(stage=None), dtype, mesh.size)
        self._expected = ExpectedTensors(
            self._stored.values(), stored_arrays(of_model).values(), is_tied=config.tie_word_embeddings
        )
        self._made_of: dict[str, list[tuple[str, ArrayInfo]]] = collections.defaultdict(list)  # of a stored array, the leaves
        map_named(lambda name, info: self._made_of[stored_name(name, info)].append((name, info)), self._arrays)
        self._names: list[str] = []
        map_named(lambda name, _: self._names.append(name), self._arrays)
        self._programs = ArrayPrograms(mesh)
        self._known: dict[Hashable, Program] = {}  # by stored array and what it is made of
        self._devices = tuple(mesh.devices.flat)

    def problems(self, given: Mapping[str, GivenTensor], *, partial: bool) -> list[str]:
        """Sentences about all that is wrong, by the tensors' names. `partial`: what is not given stays as it is."""
        return self._expected.problems(given, partial=partial)

    def apply(self, params: ParamTree | None, given: Mapping[str, GivenTensor]) -> ParamTree:
        """The tree; of `params` what is not replaced. New arrays are written into the memory of the old ones, as they come.

        `given` has no problems; all of it is needed where `params` is None: there are no weights. After an exception
        `params` are deleted.
        """
        leaves = {} if params is None else dict(zip(self._names, jax.tree.leaves(params), strict=True))
        try:
            self._replace(leaves, self._expected.named(given))
        except BaseException:
            for leaf in leaves.values():
                leaf.delete()
            raise
        tree: ParamTree = jax.tree.unflatten(jax.tree.structure(self._arrays), [leaves[name] for name in self._names])
        return tree

    def _replace(self, leaves: dict[str, jax.Array], given: Mapping[str, GivenTensor]) -> None:
        batch = ArrayBatch(leaves, most_bytes=max(info.num_bytes for info in self._stored.values()))
        for stored, made in self._made_of.items():
            (name, info), *others = made
            if isinstance(info.source, Given):
                if name not in leaves:
                    leaves[name] = give(info, info.source, self._mesh)
                continue
            if not any(option.keys() <= given.keys() for option in variants(self._stored[stored])):
                continue
            if not others and not isinstance(info.source, Derived):
                batch.add(name, self._making(stored, given, leaves.get(name)))
            else:
                (base,) = make_all([self._making(stored, given, None)])
                for name, info in made:
                    assert isinstance(info.source, Derived), info
                    if name in leaves:
                        leaves[name].delete()
                    leaves[name] = derive(info, info.source, base, self._mesh)
                base.delete()
        batch.make()
        jax.block_until_ready(list(leaves.values()))

    def _making(self, name: str, given: Mapping[str, GivenTensor], old: jax.Array | None) -> Making:
        """Of the stored array of that name, in the memory of `old`."""
        info = self._stored[name]
        source = info.source
        if isinstance(source, Source):
            return self._of_whole(name, source, [given[name] for name in source.names], old)
        assert isinstance(source, Stacked), info
        is_fused = source.fused[0].names[0] in given
        if is_fused and is_in_order(source):
            return self._of_whole(name, source.fused[0], [given[source.fused[0].names[0]]], old)
        stacks = None if is_fused else _stacks(source.parts, given)
        if stacks is not None:
            return self._of_whole(name, source.parts[0], stacks, old, of_each=True)
        sources = source.fused if is_fused else source.parts
        make_slots = functools.partial(self._make_slots, info, sources, given, is_fused=is_fused)
        return Making([], Program([], make_slots), old, info.num_bytes)

    # --- arrays of which XLA makes each device's part

    def _of_whole(
        self, name: str, source: Source, tensors: Sequence[GivenTensor], old: jax.Array | None, *, of_each: bool = False
    ) -> Making:
        info, arrays = self._stored[name], [tensor.element() for tensor in tensors]
        computes = tuple(tensor.compute for tensor in tensors)
        kinds = tuple((array.shape, array.dtype, getattr(array, "sharding", None)) for array in arrays)
        key = (name, source.names, computes, of_each, kinds, old is not None)
        if key not in self._known:
            make = WholeArray(info.anonymous, dataclasses.replace(source, names=()), computes, self._shards(info), of_each)
            self._known[key] = self._programs.of_whole(make, info.spec, arrays, old)
        return Making(arrays, self._known[key], old, info.num_bytes)

    def _shards(self, info: ArrayInfo) -> int:
        """Over how many devices the rows that the source speaks of are divided."""
        source = info.source
        is_transposed = isinstance(source, Source) and source.transposed
        axes = info.spec[-1 if is_transposed else 0]
        if axes is None or isinstance(source, Stacked):
            return 1
        names = (axes,) if isinstance(axes, str) else axes
        return int(np.prod([self._mesh.shape[name] for name in names]))

    # --- matrices of experts, each of which goes to the device of its slot

    def _make_slots(
        self,
        info: ArrayInfo,
        sources: Sequence[Source],
        given: Mapping[str, GivenTensor],
        old: jax.Array | None,
        brought: Sequence[jax.Array],
        *,
        is_fused: bool,
    ) -> jax.Array:
        assert not brought  # each to its own device, here
        elements: dict[str, jax.Array] = {}
        per_device = len(sources) // self._mesh.size
        columns: list[list[jax.Array]] = []  # of each slot of a device, the tensors it is made of
        computes: list[tuple[Compute, ...]] = []
        for place in range(per_device):
            of_place = sources[place::per_device]
            tensors, made = [], []
            for number in range(len(of_place[0].names)):
                several = [given[source.names[number]] for source in of_place]
                alike = len({tensor.compute for tensor in several}) == 1 and not is_fused
                blocks = {}
                for device, source, tensor in zip(self._devices, of_place, several, strict=True):
                    name = source.names[number]
                    if name not in elements:
                        elements[name] = self._element(tensor, device, computes=not alike)
                    blocks[device] = Block(elements[name], _bounds(elements[name].shape, source.matrix if is_fused else None))
                tensors.append(self._stack(bring(blocks)))
                made.append(several[0].compute if alike else None)
            columns.append(tensors)
            computes.append(tuple(made))
        make = SlotArray(self._mesh, info.anonymous, info.spec, self._by_device(sources, per_device), tuple(computes))
        result: jax.Array = self._programs.of_slots(make, info.spec, old)(old, columns)
        return result

    def _element(self, tensor: GivenTensor, device: jax.Device, *, computes: bool) -> jax.Array:
        element = tensor.element()
        array = jax.device_put(element, device) if isinstance(element, np.ndarray) else element
        return jax.jit(tensor.compute)(array) if computes and tensor.compute is not None else array

    def _stack(self, shards: Sequence[jax.Array]) -> jax.Array:
        """One below the other, each on its device."""
        first, *others = shards[0].shape
        sharding = NamedSharding(self._mesh, PartitionSpec(ALL_AXES))
        return jax.make_array_from_single_device_arrays((len(shards) * first, *others), sharding, shards)

    def _by_device(self, sources: Sequence[Source], per_device: int) -> tuple[tuple[Source, ...], ...]:
        """What each device's slots are made of, whatever it is called."""
        plain = [
            dataclasses.replace(source, names=(), matrix=None if source.matrix is None else 0, shapes=()) for source in sources
        ]
        return tuple(tuple(plain[start : start + per_device]) for start in range(0, len(plain), per_device))


def check(stages: Iterable[TensorUpdate], given: Mapping[str, GivenTensor], *, partial: bool) -> None:
    """ValueError with all that is wrong for any of them, once."""
    problems = dict.fromkeys(problem for stage in stages for problem in stage.problems(given, partial=partial))
    if problems:
        raise ValueError(" ".join(problems))


def _stacks(sources: Sequence[Source], given: Mapping[str, GivenTensor]) -> list[GivenTensor] | None:
    """Of the tensors that each expert has, the arrays that hold one of each expert in order; None if they are given otherwise,
    or slots are others than the experts."""
    if not are_alike(sources):
        return None
    stacks = []
    for number in range(len(sources[0].names)):
        tensors = [given[source.names[number]] for source in sources]
        first = tensors[0]
        *outer, _ = first.index or (0,)
        stack = dataclasses.replace(first, index=tuple(outer))
        is_stack = bool(first.index) and first.array.shape[len(outer)] == len(tensors)
        if not is_stack or any(
            (tensor.array is not first.array, tensor.compute, tensor.index) != (False, first.compute, (*outer, expert))
            for expert, tensor in enumerate(tensors)
        ):
            return None
        stacks.append(stack)
    return stacks


def _bounds(shape: tuple[int, ...], matrix: int | None) -> tuple[tuple[int, int], ...]:
    """Of all of an array, or of one of its matrices."""
    whole = tuple((0, size) for size in shape)
    return whole if matrix is None else ((matrix, matrix + 1), *whole[1:])
