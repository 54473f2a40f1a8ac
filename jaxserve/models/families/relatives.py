"""The nearest relative of an architecture that no family reads: by the keys of its config.json and by its name.

Keys count the more the fewer families have them: hidden_size says nothing, kv_lora_rank nearly all.
"""

from __future__ import annotations

import collections
import difflib
import math
from collections.abc import Collection, Iterable, Mapping

from jaxserve.models.families.architectures import split_architecture
from jaxserve.models.families.catalogue import Entry, catalogue
from jaxserve.models.families.common import Family


def nearest_relative(names: Iterable[str], keys: Collection[str], families: Collection[Family]) -> Family:
    """Of an architecture that config.json calls `names` (`architectures`, `model_type`) and describes with `keys`."""
    names = [_bare(name) for name in names]
    entries = catalogue()
    counts = collections.Counter(key for entry in entries.values() for key in entry.keys)
    weights = {key: math.log(1 + len(entries) / count) for key, count in counts.items()}

    def likeness(family: Family) -> float:
        own = (_bare(family.architecture), _bare(family.model_type))
        by_name = max((difflib.SequenceMatcher(None, left, right).ratio() for left in names for right in own), default=0.0)
        return by_name + _shared(entries.get(family.architecture), keys, weights)

    return max(families, key=likeness)


def _shared(entry: Entry | None, keys: Collection[str], weights: Mapping[str, float]) -> float:
    """0 to 1: the cosine between two sets of weighted keys. Keys that no family has are left out."""
    if entry is None:
        return 0.0

    def length(which: Iterable[str]) -> float:
        return math.sqrt(sum(weights.get(key, 0.0) ** 2 for key in which))

    lengths = length(keys) * length(entry.keys)
    return length(entry.keys.intersection(keys)) ** 2 / lengths if lengths else 0.0


def _bare(name: str) -> str:
    return split_architecture(name)[0].replace("_", "").lower()
