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

from jaxserve.models.families.common import Family, FamilyTraits, required_int

__all__ = ["Family", "FamilyTraits", "families", "find_family", "required_int"]


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
    """The family of a config.json object. Raises ValueError that lists the known ones."""
    architectures = raw.get("architectures") or ()
    for family in families():
        if family.architecture in architectures or (not architectures and family.model_type == raw.get("model_type")):
            return family
    known = ", ".join(family.architecture for family in families())
    if architectures:
        raise ValueError(f"architecture {', '.join(map(repr, architectures))} is not supported; supported: {known}.")
    raise ValueError(f"model_type {raw.get('model_type')!r} (no architectures given) is not supported; supported: {known}.")
