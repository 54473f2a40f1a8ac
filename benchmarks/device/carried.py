"""Programs that were compiled for an H200 without one: are they taken there, and are they as right and fast as its own?

The sections `parity` and `model` each have a case that loads them. `benchmarks.device.carry` makes them.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

from benchmarks.device.case import NotHereError, Numbers
from benchmarks.device.driver import Plan
from benchmarks.device.machine import ROOT

FOLDER = ROOT / ".device-programs"
ENVIRONMENT = "environment.txt"  # that the programs were compiled for


@dataclasses.dataclass(frozen=True)
class Carried:
    """A copy of the carried folder, for a runner of its own to load from."""

    plan: Plan
    files: frozenset[int]  # inodes of the entries that came along

    @staticmethod
    def copy(plan: Plan, folder: Path) -> Carried:
        """NotHereError if the folder has none for this model."""
        source = of_model(folder, plan)
        if not source.is_dir():
            raise NotHereError("no programs were carried: make device-programs")
        copied = Path(tempfile.mkdtemp()) / "programs"
        shutil.copytree(source, copied)
        return Carried(dataclasses.replace(plan, compiled=str(copied)), frozenset(_entries(copied).values()))

    def compiled_anew(self) -> list[str]:
        """Names of programs that a runner put there since: it could not find or not load those that came along."""
        entries = _entries(Path(self.plan.compiled)).items()
        return sorted({path.name.rsplit("-", 1)[0] for path, inode in entries if inode not in self.files})

    def taken(self) -> Numbers:
        """How many of them, and if not all, what is different here."""
        from jaxserve.executor.environment import environment
        from jaxserve.executor.mesh import make_mesh

        names, anew = {path.name.rsplit("-", 1)[0] for path in _entries(Path(self.plan.compiled))}, self.compiled_anew()
        numbers: Numbers = {"programs": len(names), "taken": len(names) - len(anew)}
        if not anew:
            return numbers
        here = environment(make_mesh(1)).splitlines()
        there = (Path(self.plan.compiled) / ENVIRONMENT).read_text().splitlines()
        differences = [f"{line} (there: {other})" for line, other in zip(here, there, strict=True) if line != other]
        return {**numbers, "status": "failed", "reason": f"compiled here: {', '.join(anew)}; differs: {differences}"}


def of_model(folder: Path, plan: Plan) -> Path:
    return folder / Path(plan.model).name


def _entries(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_ino for path in (folder / "executables").glob("*.program")}
