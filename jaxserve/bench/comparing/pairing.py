"""Which records of two files are about the same load, and in what else they differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.bench.comparing.measures import KINDS, Kind
from jaxserve.bench.record import Record, kind_of, read_records

# Of a server's state, and how a run went: no difference of set-up.
_RUN = {"time", "command", "internal_states", "startup_s", "uptime_s", "client", "timeline", "cache_report"}
_LONGEST_VALUE = 60
# Options that say nothing unless one of these datasets is asked for.
_OF_DATASETS = {
    "random_": ("random", "random-ids", "multi-turn", "json-schema", "custom"),
    "gsp_": ("generated-shared-prefix",),
    "sharegpt_": ("sharegpt", "custom"),
    "num_turns": ("multi-turn",),
}

Load = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Pair:
    """The runs of one load, of both files."""

    kind: Kind
    load: Load
    before: list[Record]
    after: list[Record]

    @property
    def title(self) -> str:
        return _words(self.load)


@dataclasses.dataclass(frozen=True)
class Pairing:
    pairs: list[Pair]
    alone: list[str]  # loads that only one of the files has, in words
    differences: list[tuple[str, str, str]]  # what else is not the same: name, before, after


def load_records(path: Path) -> list[Record]:
    """ValueError, with a sentence, for a file without records, or with one that cannot be compared."""
    try:
        records = list(read_records(path))
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text.") from None
    if not records:
        raise ValueError(f"{path} has no records.")
    for place, record in enumerate(records, 1):
        kind = KINDS.get(kind_of(record))
        if kind is None:
            raise ValueError(f"{path}, record {place}: records of bench {kind_of(record)} are not compared.")
        if not any(measure.metric.key in record for measure in kind.measures):
            raise ValueError(f"{path}, record {place}: none of the numbers that a record of bench {kind_of(record)} has.")
    return records


def pair_up(before: list[Record], after: list[Record]) -> Pairing:
    """ValueError if no load is in both."""
    ours, theirs = _by_load(before), _by_load(after)
    shared = [load for load in ours if load in theirs]
    if not shared:
        name, one, other = _first_difference(next(iter(ours)), next(iter(theirs)))
        raise ValueError(f"No load is in both files: {name} is {one} in the first and {other} in the second.")
    pairs = [Pair(KINDS[kind], load, ours[kind, load], theirs[kind, load]) for kind, load in shared]
    alone = [f"only the first has {_words(load[1])}" for load in ours if load not in theirs]
    alone += [f"only the second has {_words(load[1])}" for load in theirs if load not in ours]
    return Pairing(pairs, alone, _differences(pairs))


def _by_load(records: list[Record]) -> dict[tuple[str, Load], list[Record]]:
    found: dict[tuple[str, Load], list[Record]] = {}
    for record in records:
        kind = kind_of(record)
        load = tuple((name, _hashable(record.get(name))) for name in KINDS[kind].load if _counts(name, record))
        found.setdefault((kind, load), []).append(record)
    return found


def _counts(name: str, record: Record) -> bool:
    of = next((datasets for prefix, datasets in _OF_DATASETS.items() if name.startswith(prefix)), None)
    return of is None or record.get("dataset_name") in of


def _hashable(value: Any) -> Any:
    return str(value) if isinstance(value, list | dict) else value


def _first_difference(ours: tuple[str, Load], theirs: tuple[str, Load]) -> tuple[str, str, str]:
    if ours[0] != theirs[0]:
        return "the command", f"bench {ours[0]}", f"bench {theirs[0]}"
    one, other = dict(ours[1]), dict(theirs[1])
    name = next(name for name in one | other if one.get(name) != other.get(name))
    return name, str(one.get(name)), str(other.get(name))


def _words(load: Load) -> str:
    return ", ".join(f"{name} {value}" for name, value in load if value not in (None, "", False))


def _differences(pairs: list[Pair]) -> list[tuple[str, str, str]]:
    """Of what stands in records beside loads and numbers; each side in all its values."""
    sides: tuple[dict[str, set[str]], dict[str, set[str]]] = ({}, {})
    for pair in pairs:
        known = {name for name, _ in pair.load} | {measure.metric.key for measure in pair.kind.measures}
        for side, records in zip(sides, (pair.before, pair.after), strict=True):
            for record in records:
                for name, value in _settings(record, known).items():
                    side.setdefault(name, set()).add(value)
    names = [name for name in (sides[0] | sides[1]) if sides[0].get(name) != sides[1].get(name)]
    return [(name, _joined(sides[0].get(name)), _joined(sides[1].get(name))) for name in names]


def _joined(values: set[str] | None) -> str:
    return " or ".join(sorted(values)) if values else "not said"


def _settings(record: Mapping[str, Any], known: set[str], prefix: str = "") -> dict[str, str]:
    """Words and switches; a record's own numbers are measurements, those of its options are not."""
    found: dict[str, str] = {}
    for name, value in record.items():
        if name in known or name in _RUN:
            continue
        if isinstance(value, Mapping):
            found |= _settings(value, set(), f"{prefix}{name}.")
        elif isinstance(value, str | bool) or (prefix and isinstance(value, int | float)):
            text = str(value)
            found[prefix + name] = text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
    return found
