"""A section of cases that do what kernels on new hardware may do: return, hang, take the process down, fail, take too long."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.device.case import Case, Measure, NotHereError, Setting


def _ready(measure: Measure) -> Callable[[], Measure]:
    return lambda: measure


def _absent() -> Measure:
    raise NotHereError("no kernel takes this shape")


def _without_package() -> Measure:
    import no_such_package  # noqa: F401

    raise AssertionError


def _counted(setting: Setting, name: str, numbers: dict[str, Any]) -> Callable[[], Measure]:
    """Leaves a line each time it runs, beside the events."""

    def measure() -> dict[str, Any]:
        with (setting.out / "ran").open("a") as file:
            file.write(f"{name}\n")
        return numbers

    return _ready(measure)


def _slow(setting: Setting) -> Measure:
    """Until the file is there: what a run may be killed in."""
    while not (setting.out / "go").exists():
        time.sleep(0.02)
    return lambda: {"us": 3.0}


def cases(setting: Setting) -> list[Case]:
    if os.environ.get("MADE_UP") == "slow":
        return [
            Case("first", _counted(setting, "first", {"us": 1.0})),
            Case("slow", lambda: _slow(setting)),
            Case("last", _counted(setting, "last", {"us": 4.0})),
        ]
    return [
        Case("good", _counted(setting, "good", {"us": 2.0, "bytes": 10})),
        Case("absent", _absent),
        Case("without a package", _without_package),
        Case("hang", _ready(lambda: time.sleep(60) or {}), limit_s=0.5),
        Case("long compilation", lambda: time.sleep(1) or (lambda: {"us": 5.0}), limit_s=0.5),
        Case("endless compilation", lambda: time.sleep(60) or dict, prepare_limit_s=0.5),
        Case("crash", _ready(lambda: os._exit(7))),
        Case("raise", _ready(lambda: {"us": 1 / 0})),
        Case("last", _counted(setting, "last", {"us": 4.0, "against": "good"})),
    ]


def ran(out: Path) -> list[str]:
    path = out / "ran"
    return path.read_text().split() if path.exists() else []
