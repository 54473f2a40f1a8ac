"""Tensors that somebody hands over as arrays, under the names of a Hugging Face checkpoint, and whether a model can use them.

Everything here is known before a single element is touched: names, shapes, types, whether an array still exists.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.arrays import ArrayInfo, Source, Stacked
from jaxserve.models.redistribute import plain
from jaxserve.models.safetensors_files import spellings

_TYPES = ("float64", "float32", "float16", "bfloat16")
_MOST_NAMES = 3  # that a sentence lists
_TIED_HEAD = "lm_head.weight"
_PASSED_OVER = "rotary_emb.inv_freq"  # older checkpoints have it; it follows from the config


@dataclasses.dataclass(frozen=True)
class GivenTensor:
    """What somebody hands over in place of a checkpoint's tensor."""

    array: jax.Array | np.ndarray
    # Makes the checkpoint's tensor, [out, in], of the array. The same function for what is computed alike: it is part of a
    # program that is compiled once for each, so that a transposition costs nothing.
    compute: Callable[[jax.Array], jax.Array] | None = None
    index: tuple[int, ...] = ()  # where the array stacks such tensors, or those that `compute` takes, along its first axes

    def element(self) -> jax.Array | np.ndarray:
        """That of the stack, on the devices where it is; what `compute` takes."""
        if isinstance(self.array, np.ndarray):
            return np.asarray(self.array[self.index])
        array = plain(self.array)
        return _element(array, np.array(self.index, np.int32)) if self.index else array


@jax.jit
def _element(array: jax.Array, index: jax.Array) -> jax.Array:
    """One program for all of a stack."""
    for axis in range(len(index)):
        array = jax.lax.dynamic_index_in_dim(array, index[axis], 0, keepdims=False)
    return array


class ExpectedTensors:
    """What a model, or a stage of it, is made of."""

    def __init__(self, stored: Iterable[ArrayInfo], of_model: Iterable[ArrayInfo], *, is_tied: bool) -> None:
        """`of_model`: of all stages. `is_tied`: the output head is the embedding."""
        self._variants = [variants(info) for info in stored]
        self._shapes = {name: shape for options in self._variants for names in options for name, shape in names.items()}
        names = {name for info in of_model for option in variants(info) for name in option}
        self._name_of = {spelling: name for name in names for spelling in reversed([*spellings(name)])}
        if is_tied:
            self._name_of.pop(_TIED_HEAD, None)
        self._passed_over = {_TIED_HEAD} if is_tied else set()

    def named(self, given: Mapping[str, GivenTensor]) -> dict[str, GivenTensor]:
        """By the names that descriptions have, without what is passed over."""
        return {self._name_of[name]: tensor for name, tensor in given.items() if name in self._name_of}

    def problems(self, given: Mapping[str, GivenTensor], *, partial: bool) -> list[str]:
        """Sentences about all that is wrong. `partial`: what is not given is to stay as it is."""
        known = self.named(given)
        sentences = [
            "" if given else "No tensors are given.",
            sentence("The model has no tensors of these names: {}.", filter(self._is_unknown, given)),
            sentence("Given twice, under several names: {}.", self._given_twice(given)),
            *unreachable(given),
            sentence(f"Types that are none of {', '.join(_TYPES)}: {{}}.", _wrong_types(known)),
            sentence("Wrong shapes: {}.", self._wrong_shapes(known)),
            *self._incomplete(known, partial=partial),
        ]
        return [*filter(None, sentences)]

    def _is_unknown(self, name: str) -> bool:
        return name not in self._name_of and name not in self._passed_over and not name.endswith(_PASSED_OVER)

    def _given_twice(self, given: Mapping[str, GivenTensor]) -> list[str]:
        counts = collections.Counter(self._name_of[name] for name in given if name in self._name_of)
        return [name for name, count in counts.items() if count > 1]

    def _wrong_shapes(self, known: Mapping[str, GivenTensor]) -> Iterator[str]:
        computed = functools.cache(_computed_shape)  # layers are alike
        for name, tensor in known.items():
            if name not in self._shapes:
                continue
            try:
                if any(place >= size for place, size in zip(tensor.index, tensor.array.shape, strict=False)):
                    yield f"{name} would be number {list(tensor.index)} of a stack {list(tensor.array.shape)}"
                    continue
                shape = computed(tensor.compute, tensor.array.shape[len(tensor.index) :], tensor.array.dtype)
            except Exception as error:  # whatever the user's function raises
                reason = str(error).strip().split("\n")[0] or type(error).__name__
                yield f"{name} cannot be computed from {list(tensor.array.shape)} ({reason})"
                continue
            if shape != self._shapes[name]:
                yield f"{name} is {list(shape)}, but config.json asks for {list(self._shapes[name])}"

    def _incomplete(self, known: Mapping[str, GivenTensor], *, partial: bool) -> list[str]:
        missing: dict[str, None] = {}
        parts: dict[str, None] = {}
        both: dict[str, None] = {}
        for options in self._variants:
            started = [option for option in options if option.keys() & known.keys()]
            if len(started) > 1:
                both[next(name for name in started[0] if name in known)] = None
            (*_, chosen) = started or options
            lacks = [name for name in chosen if name not in known]
            if not partial:
                missing |= dict.fromkeys(lacks)
            elif started and lacks:
                has = next(name for name in chosen if name in known)
                parts[f"{has} is given without {few_of(lacks)}"] = None
        return [
            sentence("Missing tensors: {}.", missing),
            sentence("Stored as one and given in part: {}.", parts),
            sentence("Experts that are given one by one as well: {}.", both),
        ]


def _computed_shape(compute: Callable[[jax.Array], jax.Array] | None, shape: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    """Raises whatever `compute` raises."""
    return shape if compute is None else tuple(jax.eval_shape(compute, jax.ShapeDtypeStruct(shape, dtype)).shape)


def variants(info: ArrayInfo) -> list[dict[str, tuple[int, ...]]]:
    """What an array can be made of, as tensors and their shapes: experts stacked, or else one by one."""
    source = info.source
    assert isinstance(source, Source | Stacked), info  # stored arrays are not derived
    if isinstance(source, Source):
        return [_tensors([source])]
    return [_tensors(option) for option in (source.fused, source.parts) if option]


def _tensors(sources: Iterable[Source]) -> dict[str, tuple[int, ...]]:
    return {name: shape for source in sources for name, shape in zip(source.names, source.shapes, strict=True)}


def _wrong_types(known: Mapping[str, GivenTensor]) -> Iterator[str]:
    for name, tensor in known.items():
        if jnp.dtype(tensor.array.dtype).name not in _TYPES:
            yield f"{name} is {jnp.dtype(tensor.array.dtype).name}"


def unreachable(given: Mapping[str, GivenTensor]) -> list[str]:
    """Sentences about arrays whose elements this process cannot have."""
    arrays = {name: tensor.array for name, tensor in given.items() if isinstance(tensor.array, jax.Array)}
    sentences = [
        sentence("Deleted arrays, as donated ones are: {}.", (name for name, array in arrays.items() if array.is_deleted())),
        sentence(
            "Arrays that this process reaches only in part: {}.",
            (name for name, array in arrays.items() if not array.is_fully_addressable),
        ),
    ]
    return [*filter(None, sentences)]


def sentence(form: str, items: Iterable[str]) -> str:
    """Nothing for no items."""
    found = list(items)
    return form.format(few_of(found)) if found else ""


def few_of(items: list[str]) -> str:
    more = len(items) - _MOST_NAMES
    return ", ".join(items[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
