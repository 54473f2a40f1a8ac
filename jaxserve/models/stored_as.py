"""Descriptions of arrays by the tensors that a checkpoint really has (`TensorNames`), made of those by Llama's names."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from jaxserve.models.arrays import ArrayInfo, Derived, Given, Rows, Source, Stacked
from jaxserve.models.tensor_names import LLAMA_NAMES, Packed, TensorNames, has_part, packed_name


def stored_as(info: ArrayInfo, names: TensorNames) -> ArrayInfo:
    """The same array, read from tensors that are named and packed so."""
    source = info.source
    if names == LLAMA_NAMES or isinstance(source, Given):
        return info
    if isinstance(source, Derived):
        return dataclasses.replace(info, source=dataclasses.replace(source, base=stored_as(source.base, names)))
    if isinstance(source, Stacked):
        parts = tuple(_stored_as(part, names) for part in source.parts)
        fused = tuple(_stored_as(part, names) for part in source.fused)
        if names.experts_in_first:
            parts, fused = (), tuple(map(_in_first, fused))
        if names.experts_in_one:
            parts = ()
        if names.experts_alternate:
            fused = tuple(map(_alternating, fused))
        return dataclasses.replace(info, source=Stacked(parts, fused))
    source = _stored_as(source, names)
    return dataclasses.replace(info, source=_alternating(source) if names.experts_alternate else source)


def _stored_as(source: Source, names: TensorNames) -> Source:
    for pack in names.packed:
        order = _places(source.names, pack)
        if order is not None:
            source = _packed(source, pack, order)
    if any(has_part(name, vector) for vector in names.in_one_row for name in source.names):
        source = dataclasses.replace(source, shapes=tuple((1, *shape) for shape in source.shapes), matrix=0)
    return dataclasses.replace(source, names=tuple(map(names.of, source.names)))


def _in_first(source: Source) -> Source:
    """Of a stack [experts, out, in] the same of [experts, in, out]; vectors as they are."""
    if len(source.shapes[0]) == 2:
        return source
    ((experts, size_out, size_in),) = source.shapes
    return dataclasses.replace(source, shapes=((experts, size_in, size_out),), in_first=True)


def _alternating(source: Source) -> Source:
    """Of gates and ups together the same, where they come in turns; anything else as it is."""
    if "gate_up_proj" not in source.names[0]:
        return source
    shape = source.shapes[0]
    size_out = shape[1] if len(shape) == 3 and not source.in_first else shape[-1]
    halves = ((0, size_out // 2), (size_out // 2, size_out))
    pieces = [
        (place, max(row.start, start) - start, min(row.start + row.count, stop) - start)
        for row in source.rows
        for place, (start, stop) in enumerate(halves)
    ]
    rows = tuple(Rows(0, 2 * first + place, last - first, 2) for place, first, last in pieces if first < last)
    return dataclasses.replace(source, rows=rows)


def _places(names: Sequence[str], pack: Packed) -> list[int] | None:
    """Where in `names` the parts of a pack stand, in the pack's order; None unless all of them are there."""
    packed = [[packed_name(pack, part, name) for name in names] for part in pack.parts]
    if not all(any(of_part) for of_part in packed):
        return None
    return [next(place for place, name in enumerate(of_part) if name is not None) for of_part in packed]


def _packed(source: Source, pack: Packed, order: Sequence[int]) -> Source:
    """The same rows, out of one tensor for all that is packed, and those that are not."""
    counts = [source.shapes[place][0] for place in order]
    assert all(count % pack.groups == 0 for count in counts), (pack, counts)
    runs = [count // pack.groups for count in counts]
    before = dict(zip(order, itertools.accumulate(runs, initial=0), strict=False))  # part -> rows of a group above its run
    run_of = dict(zip(order, runs, strict=True))
    others = [place for place in range(len(source.names)) if place not in before]

    def moved(row: Rows) -> Iterator[Rows]:
        if row.tensor is None or row.tensor in others:
            yield row if row.tensor is None else dataclasses.replace(row, tensor=1 + others.index(row.tensor))
            return
        start, left, run = row.start, row.count, run_of[row.tensor]
        while left:
            group, within = divmod(start, run)
            count = min(left, -(-(run - within) // row.step))
            yield Rows(0, group * sum(runs) + before[row.tensor] + within, count, row.step)
            start, left = start + count * row.step, left - count

    name = packed_name(pack, pack.parts[0], source.names[order[0]])
    assert name is not None
    shape, rows = (sum(counts), *source.shapes[0][1:]), tuple(piece for row in source.rows for piece in moved(row))
    names, shapes = ((name, *(source.names[place] for place in others)), (shape, *(source.shapes[place] for place in others)))
    return dataclasses.replace(source, names=names, shapes=shapes, rows=rows)
