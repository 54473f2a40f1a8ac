"""All control requests: the `CONTROL` of every file of this package, found by looking."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import types
from collections.abc import Mapping

import jaxserve.scheduler.control as package
from jaxserve.scheduler.control.declaration import Control, ControlStruct


@functools.cache
def controls() -> Mapping[str, Control]:
    """By name."""
    found: dict[str, Control] = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        control: Control | None = getattr(importlib.import_module(f"{package.__name__}.{name}"), "CONTROL", None)
        if control is not None:
            assert control.name not in found, f"two control requests are called {control.name!r}"
            found[control.name] = control
    return types.MappingProxyType(found)


@functools.cache
def control_of(kind: type[ControlStruct]) -> Control:
    """The declaration of a request struct."""
    return next(control for control in controls().values() if control.request is kind)
