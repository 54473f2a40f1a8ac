"""What is known of each architecture beside how it is read: how it was tested, what it is made of, which kernels serve it.

`scripts/document_models.py` writes it into tested.json beside this file, from the cases of the tests and from the backends, so
that asking costs neither JAX nor a test. An architecture that is not in it yet has no entry.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """Of one architecture."""

    file: str  # of this package, without .py
    oracle: str  # Transformers' class whose logits, or an encoder's hidden states, its own equal
    is_rewritten: bool  # that class is a relative's: config.json and tensors were written anew in this family's form
    # By what its tokens and logprobs were compared: server, scheduler; logits, or an encoder's hidden states: the model alone.
    served: tuple[str, ...]
    made_of: tuple[str, ...]  # kinds of mixers and MLPs, and what they do beside
    kernels: Mapping[str, str]  # platform -> attention backend
    keys: frozenset[str]  # of config.json, beside those that every file has


@functools.cache
def catalogue() -> Mapping[str, Entry]:
    """By architecture."""
    raw = json.loads(importlib.resources.files(__package__).joinpath("tested.json").read_text(encoding="utf-8"))
    return {
        architecture: Entry(
            file=entry["file"],
            oracle=entry["oracle"],
            is_rewritten=entry["is_rewritten"],
            served=tuple(entry["served"]),
            made_of=tuple(entry["made_of"]),
            kernels=entry["kernels"],
            keys=frozenset(entry["keys"]),
        )
        for architecture, entry in raw.items()
    }
