"""The names of somebody's arrays, and which of a Hugging Face checkpoint's tensors they are.

A trainer has a tree of arrays of its own form. Here it becomes a flat mapping by dotted names, and by a mapping of names that
of tensors which `TensorUpdate` takes. No array is touched.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxserve.models.given_tensors import GivenTensor, few_of, sentence

Array: TypeAlias = jax.Array | np.ndarray
# A tensor's name, or that and what makes it of the array; None: the array is passed over; a list: it holds several tensors.
Tensor: TypeAlias = str | tuple[str, Callable[[jax.Array], jax.Array]]
Target: TypeAlias = Tensor | list[Tensor] | None
NameMapping: TypeAlias = Mapping[str, Target] | Callable[[str], Target]

_NUMBER = "*"


def named_leaves(tree: Any) -> dict[str, Array]:
    """Dotted name -> array, of dictionaries, lists, tuples, registered dataclasses, and of flax.nnx states and modules, of
    which only parameters count. ValueError names what is no array."""
    leaves: dict[str, Array] = {}
    wrong: list[str] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(_without_flax(tree))[0]:
        keys = (getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path)
        name = ".".join(str(key) for key in keys if key != "")
        if name in leaves:
            wrong.append(f"two leaves are called {name}")
        elif isinstance(leaf, Array):
            leaves[name] = leaf
        else:
            wrong.append(f"{name or 'the tree'} is a {type(leaf).__name__}")
    if wrong:
        raise ValueError(sentence("Weights must be a tree of arrays: {}.", wrong))
    return leaves


def _without_flax(tree: Any) -> Any:
    """Its states and modules as dictionaries. Whoever has one has imported it."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree

    def is_of_flax(node: Any) -> bool:
        return isinstance(node, nnx.State | nnx.Module | nnx.Variable)

    def plain(node: Any) -> Any:
        if isinstance(node, nnx.Variable):
            return node.get_value()
        if isinstance(node, nnx.Module):
            node = nnx.state(node, nnx.Param)
        return nnx.to_pure_dict(node) if isinstance(node, nnx.State) else node

    return jax.tree.map(plain, tree, is_leaf=is_of_flax)


def hugging_face_names(leaves: Mapping[str, Array], mapping: NameMapping | None) -> dict[str, GivenTensor]:
    """Tensor -> where it is. `mapping`: leaf -> tensor, as above; None: leaves are called like the tensors.

    `*` stands for a number on both sides, in order. Where a tensor's name has more of them, the leaf stacks such tensors along
    its first axes, one for each `*` that is left. ValueError with all that is wrong: leaves that are not mapped, entries
    without a leaf, tensors that come from several.
    """
    if mapping is None:
        return {name: GivenTensor(array) for name, array in leaves.items()}
    targets, unknown, unmet = _targets(leaves, mapping)
    found: dict[str, GivenTensor] = {}
    twice: list[str] = []
    for leaf, target, numbers in targets:
        for tensor in target if isinstance(target, list) else [target]:
            for name, given in _tensors(leaf, leaves[leaf], tensor, numbers):
                if name in found:
                    twice.append(name)
                found[name] = given
    sentences = [
        sentence("The mapping does not know: {}.", unknown),
        sentence("The mapping has entries that no array is called like: {}.", unmet),
        sentence("Several arrays are mapped to one tensor: {}.", twice),
    ]
    if any(sentences):
        raise ValueError(" ".join(filter(None, sentences)))
    return found


def _targets(
    leaves: Mapping[str, Array], mapping: NameMapping
) -> tuple[list[tuple[str, Target, tuple[str, ...]]], list[str], list[str]]:
    """Leaf, what it is mapped to, and the numbers in its name, of those that are not passed over; unknown leaves, unmet
    entries."""
    if not isinstance(mapping, Mapping):
        called = ((leaf, mapping(leaf), ()) for leaf in leaves)
        return [entry for entry in called if entry[1] is not None], [], []
    patterns = {key: re.compile(re.escape(key).replace(re.escape(_NUMBER), r"(\d+)")) for key in mapping if _NUMBER in key}
    found: list[tuple[str, Target, tuple[str, ...]]] = []
    unknown, unmet = [], dict.fromkeys(mapping)
    for leaf in leaves:
        met = _entry(leaf, mapping, patterns)
        if met is None:
            unknown.append(leaf)
            continue
        key, numbers = met
        unmet.pop(key, None)
        if mapping[key] is not None:
            found.append((leaf, mapping[key], numbers))
    return found, unknown, list(unmet)


def _entry(
    leaf: str, mapping: Mapping[str, Target], patterns: Mapping[str, re.Pattern[str]]
) -> tuple[str, tuple[str, ...]] | None:
    """The key of the mapping that a leaf is called like, and the numbers that its `*` stand for."""
    if leaf in mapping:
        return leaf, ()
    for key, pattern in patterns.items():
        match = pattern.fullmatch(leaf)
        if match is not None:
            return key, match.groups()
    return None


def _tensors(leaf: str, array: Array, tensor: Any, numbers: tuple[str, ...]) -> Iterator[tuple[str, GivenTensor]]:
    """By name: of one array several if it stacks them."""
    name, compute = (tensor, None) if isinstance(tensor, str) else _pair(leaf, tensor)
    pieces = name.split(_NUMBER)
    num_stacked = len(pieces) - 1 - len(numbers)
    if num_stacked < 0:
        raise ValueError(f"The mapping of {leaf} must have a place for each of its {len(numbers)} numbers; got {name}.")
    if num_stacked > array.ndim:
        raise ValueError(f"{leaf} must have {num_stacked} axes to stack tensors along; got the shape {list(array.shape)}.")
    for index in itertools.product(*map(range, array.shape[:num_stacked])):
        words = [*numbers, *map(str, index), ""]
        full = "".join(itertools.chain.from_iterable(zip(pieces, words, strict=True)))
        yield full, GivenTensor(array, compute, index)


def _pair(leaf: str, tensor: Any) -> tuple[str, Callable[[jax.Array], jax.Array]]:
    is_pair = isinstance(tensor, tuple) and len(tensor) == 2
    if not is_pair or not isinstance(tensor[0], str) or not callable(tensor[1]):
        raise ValueError(f"The mapping of {leaf} must be a name, or a name and a function; got {few_of([repr(tensor)])}.")
    name, compute = tensor
    return name, compute
