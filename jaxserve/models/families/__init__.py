"""The model families, one file each: functions from config.json to `FamilyTraits`, the layers and what else a family decides.

A family is found by being there: the `FAMILIES` of every file of this package. What families share is read in `common` and in
`jaxserve.models.config`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.architectures import is_relative
from jaxserve.models.families.common import Family, FamilyTraits, renamed, required_int
from jaxserve.models.families.relatives import nearest_relative

__all__ = ["Family", "FamilyTraits", "families", "find_family", "renamed", "required_int"]


@functools.cache
def families() -> tuple[Family, ...]:
    """All of them, by the name of their architecture."""
    found: dict[str, Family] = {}
    for info in pkgutil.iter_modules(__path__):
        for family in getattr(importlib.import_module(f"{__name__}.{info.name}"), "FAMILIES", ()):
            assert family.architecture not in found, f"{family.architecture} is read by two files"
            found[family.architecture] = family
    return tuple(found[name] for name in sorted(found))


def find_family(raw: Mapping[str, Any]) -> Family:
    """The family of a config.json object, whatever head it has. Raises ValueError that names the nearest relative."""
    architectures = raw.get("architectures") or ()
    for family in families():
        if family.architecture in architectures or (not architectures and family.model_type == raw.get("model_type")):
            return family
    for family in families():
        if any(is_relative(name, family.architecture, family.model_type) for name in architectures):
            return family
    model_type = raw.get("model_type")
    names = [name for name in (*architectures, model_type) if isinstance(name, str)]
    relative = nearest_relative(names, raw.keys(), families())
    file = relative.read.__module__.replace(".", "/")
    nearest = (
        f"{relative.architecture} ({file}.py). `jaxserve models` lists all; how one is added: "
        'CONTRIBUTING.md, "Add a model family".'
    )
    if architectures:
        raise ValueError(f"architecture {', '.join(map(repr, architectures))} is not supported; the nearest that is: {nearest}")
    raise ValueError(f"model_type {model_type!r} (no architectures given) is not supported; the nearest that is: {nearest}")
