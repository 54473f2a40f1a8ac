"""The runs of some files, each under the name that tells it from the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxserve.bench.comparing import load_records
from jaxserve.bench.comparing.measures import KINDS
from jaxserve.bench.record import Record, kind_of

_UNITS = {"request_rate": "req/s", "max_concurrency": "at once", "num_prompts": "prompts"}
_MEANINGS = {"at once": "requests at once", "req/s": "requests per second"}


@dataclasses.dataclass(frozen=True)
class Run:
    record: Record
    source: str  # name of the file, where there are several
    varied: tuple[tuple[str, str], ...]  # what this run has other than the others of its file: unit or key, and value

    @property
    def point(self) -> str:
        return ", ".join(f"{value} {key}" if key in _UNITS.values() else f"{key} {value}" for key, value in self.varied)

    @property
    def meanings(self) -> tuple[str, ...]:
        """What the numbers of `mark` are."""
        return tuple(_MEANINGS.get(key, key) for key, _ in self.varied)

    @property
    def mark(self) -> str:
        """Of a point in a picture that says what points are named by."""
        return ", ".join(value for _, value in self.varied)

    @property
    def name(self) -> str:
        return ", ".join(part for part in (self.source, self.point) if part)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Of bench serving, in the order of what was swept. ValueError with a sentence for files that are none."""
    runs: list[Run] = []
    names = _short_names(paths)
    for path, name in zip(paths, names, strict=True):
        records = [record for record in load_records(path) if kind_of(record) == "serving"]
        if not records:
            raise ValueError(f"{path} has no records of bench serving.")
        varied = [key for key in KINDS["serving"].load if len({_text(record.get(key)) for record in records}) > 1]
        if varied:
            records.sort(key=lambda record: [_order(record.get(key)) for key in varied])
        for record in records:
            runs.append(Run(record, name, tuple((_UNITS.get(key, key), _text(record.get(key))) for key in varied)))
    return runs


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Stems; whole paths where two are the same; nothing for a file that is alone."""
    if len(paths) == 1:
        return [""]
    stems = [path.stem for path in paths]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in paths]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _order(value: Any) -> tuple[float, str]:
    """Numbers, "inf" among them, before words."""
    try:
        return float(value), ""
    except (TypeError, ValueError):
        return float("inf"), str(value)


def by_source(runs: Iterable[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.source, []).append(run)
    return found
