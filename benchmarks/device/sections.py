"""The sections: what each is made of, how its processes run, and which share of the time it may take."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Section:
    name: str
    module: str  # offers cases(setting)
    share: float  # of the time that is left, against the shares of the sections from here on
    process: str = ""  # neighbours of one name share a worker process; default: the section's own
    workers: int = 1  # that share the device; only where nothing is timed
    is_gate: bool = False  # a failure ends the run

    @property
    def group(self) -> str:
        return self.process or self.name


# In the order in which they run: what everything else is measured against first.
SECTIONS = (
    Section("canary", "benchmarks.device.canary", 1, workers=6, is_gate=True),
    Section("ceilings", "benchmarks.device.ceilings", 1),
    Section("checks", "benchmarks.device.checks", 6, workers=8),
    Section("decode", "benchmarks.device.decode", 3, "kernels"),
    Section("extend", "benchmarks.device.extend", 2, "kernels"),
    Section("mla", "benchmarks.device.mla", 1.5, "kernels"),
    Section("write", "benchmarks.device.write", 0.5, "kernels"),
    Section("adapters", "benchmarks.device.adapters", 0.5, "kernels"),
    Section("torch", "benchmarks.device.alternatives_torch", 2),
    Section("jax", "benchmarks.device.alternatives_jax", 2),
    Section("parity", "benchmarks.device.parity", 2),
    Section("model", "benchmarks.device.model", 5),
    Section("server", "benchmarks.device.server", 3),
    Section("profile", "benchmarks.device.profile", 2),
    Section("sanitize", "benchmarks.device.sanitize", 2),
    Section("tune", "benchmarks.device.tune", 4),
)
NAMES = tuple(section.name for section in SECTIONS)


def grouped(sections: Iterable[Section]) -> list[list[Section]]:
    """Those that share a process, together."""
    return [list(group) for _, group in itertools.groupby(sections, key=lambda section: section.group)]


def share_of_rest(groups: Sequence[Sequence[Section]]) -> float:
    """The part of the time left that the first group may take. What it leaves is shared anew by the others."""
    shares = [sum(section.share for section in group) for group in groups]
    return shares[0] / sum(shares)
