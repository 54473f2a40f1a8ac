"""Arrays that are made together: whatever has to come from other devices for them comes at once."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from jaxserve.models.array_programs import Program
from jaxserve.models.redistribute import redistribute


@dataclasses.dataclass(frozen=True)
class Making:
    """Of an array in the memory of `old`."""

    arrays: Sequence[jax.Array | np.ndarray]
    program: Program
    old: jax.Array | None
    num_bytes: int  # of the result


def make_all(makings: Sequence[Making]) -> list[jax.Array]:
    """Whatever has to come from other devices comes at once."""
    for making in makings:
        if making.program.run is None and making.old is not None:
            making.old.delete()
    brought = iter(
        redistribute(
            [array for making in makings for array in making.arrays],
            [sharding for making in makings for sharding in making.program.shardings],
            fresh=[making.program.run is None for making in makings for _ in making.arrays],
        )
    )
    made = []
    for making in makings:
        arrays = [*itertools.islice(brought, len(making.arrays))]
        made.append(arrays[0] if making.program.run is None else making.program.run(making.old, arrays))
    return made


class ArrayBatch:
    """Leaves that are made together, as many as go into half of `most_bytes`, while those before them are finished: beside the
    weights no more memory is taken than that, or than the largest array has."""

    def __init__(self, leaves: dict[str, jax.Array], *, most_bytes: int) -> None:
        self._leaves = leaves
        self._most_bytes = most_bytes
        self._makings: dict[str, Making] = {}
        self._num_bytes = 0  # of what they will make
        self._unfinished = collections.deque[list[jax.Array]]()

    def add(self, name: str, making: Making) -> None:
        if self._num_bytes + making.num_bytes > self._most_bytes // 2:
            self.make()
        self._makings[name] = making
        self._num_bytes += making.num_bytes

    def make(self) -> None:
        while self._unfinished and sum(map(_bytes, self._unfinished)) + self._num_bytes > self._most_bytes:
            jax.block_until_ready(self._unfinished.popleft())
        made = make_all([*self._makings.values()])
        self._leaves.update(zip(self._makings, made, strict=True))
        self._unfinished.append(made)
        self._makings, self._num_bytes = {}, 0


def _bytes(arrays: Sequence[jax.Array]) -> int:
    return sum(array.nbytes for array in arrays)
