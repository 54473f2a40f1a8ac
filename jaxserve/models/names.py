"""The names of the arrays in a tree of parameters, and what a checkpoint must give for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxserve.models.arrays import ArrayInfo, Derived, Given
from jaxserve.models.decoder import ParamTree


def map_named(visit: Callable[[str, Any], Any], tree: Any) -> Any:
    """Maps `visit(dotted name, leaf)` over a tree. Empty keys are left out of names."""

    def named(path: tuple[Any, ...], leaf: Any) -> Any:
        keys = (getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path)
        return visit(".".join(str(key) for key in keys if key != ""), leaf)

    return jax.tree_util.tree_map_with_path(named, tree)


def stored_name(name: str, info: ArrayInfo) -> str:
    """Of what an array of this name is made from: itself, or for a derived one of a Weight the whole weight."""
    return name.rpartition(".")[0] if isinstance(info.source, Derived) else name


def stored_arrays(arrays: ParamTree) -> dict[str, ArrayInfo]:
    """Dotted name -> what a checkpoint must give: the tree's arrays, and what the derived ones are computed from."""
    stored: dict[str, ArrayInfo] = {}

    def visit(name: str, info: ArrayInfo) -> None:
        if isinstance(info.source, Given):
            return
        base = info.source.base if isinstance(info.source, Derived) else info
        assert stored.setdefault(stored_name(name, info), base) == base, (
            f"{name} is derived from another array than its siblings"
        )

    map_named(visit, arrays)
    return stored
