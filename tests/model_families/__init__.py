"""The model families as tests know them, one file each, found by being there.

A file has CASES (name -> Case), LIVE (by a server of its own: what a family's serving can depend on) and IN_PROCESS (by
scheduler and runner in the test's process: variants). Of a family that only spells another's differently, logits are enough.
ENCODERS are cases of models that do not generate.
"""

from __future__ import annotations

import importlib
import itertools
import json
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from model_families.case import Case, Served

__all__ = ["CASES", "ENCODERS", "IN_PROCESS", "LIVE", "Case", "Served", "is_first_of_its_architecture", "marked"]


def _all(name: str, nothing: Any) -> Iterator[Any]:
    for info in pkgutil.iter_modules(__path__):
        yield getattr(importlib.import_module(f"{__name__}.{info.name}"), name, nothing)


CASES: dict[str, Case] = {name: case for cases in _all("CASES", {}) for name, case in cases.items()}
ENCODERS: dict[str, Case] = {name: case for cases in _all("ENCODERS", {}) for name, case in cases.items()}
LIVE: list[Served] = [served for part in _all("LIVE", ()) for served in part]
IN_PROCESS: list[Served] = [served for part in _all("IN_PROCESS", ()) for served in part]


def marked(serveds: list[Served]) -> list[Any]:
    """As parameters of a test."""
    return [pytest.param(served, marks=pytest.mark.matrix if served.in_matrix else ()) for served in serveds]


def is_first_of_its_architecture(name: str, checkpoint: Callable[[str], Path]) -> bool:
    """Of the cases, by what their checkpoints say."""

    def architecture(name: str) -> str:
        found: str = json.loads((checkpoint(name) / "config.json").read_text())["architectures"][0]
        return found

    before = itertools.takewhile(lambda other: other != name, CASES)
    return architecture(name) not in {architecture(other) for other in before if CASES[other].family == CASES[name].family}
