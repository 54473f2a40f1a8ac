"""TensorNames: how a family's checkpoints name tensors and what they store as one, where that is not as Llama's do.

Blocks declare their arrays by Llama's names (`self_attn.q_proj.weight`); a family whose files differ says so with its
FamilyTraits, and the descriptions are rewritten before anybody reads by them (`stored_as`). Plain data, without JAX.
"""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Packed:
    """One tensor that holds the rows of several: all of the first part, then of the second, and so on.

    With `groups`, each part is dealt out in as many equal runs: the first run of every part, then the second of every part.
    """

    name: str  # in place of the parts' own names
    parts: tuple[str, ...]
    groups: int = 1


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """What checkpoints call things. Names are whole parts of dotted names: one, or several with the dots between them.

    Tensors that are packed get the name of the pack first; what is renamed is renamed all at once, so names can be swapped.
    """

    renamed: tuple[tuple[str, str], ...] = ()  # (Llama's, the checkpoint's)
    packed: tuple[Packed, ...] = ()
    experts_in_first: bool = False  # all experts' matrices are one tensor [experts, in, out]
    experts_alternate: bool = False  # columns of an expert's gate and of its up come in turns
    experts_in_one: bool = False  # all experts' matrices are one tensor [experts, out, in]
    in_one_row: tuple[str, ...] = ()  # vectors (Llama's names) that are stored as a matrix of one row

    def of(self, name: str) -> str:
        """The checkpoint's name of a tensor."""
        return _replaced(name, dict(self.renamed)) if self.renamed else name


LLAMA_NAMES = TensorNames()


def packed_name(pack: Packed, part: str, name: str) -> str | None:
    """What `pack` makes of a tensor's name; None unless the tensor is its part `part`."""
    found = _replaced(name, {part: pack.name})
    return None if found == name else found


def has_part(name: str, part: str) -> bool:
    """Whether `part` is one or several whole parts of a tensor's name."""
    return f".{part}." in f".{name}."


def _replaced(name: str, names: dict[str, str]) -> str:
    longest_first = sorted(names, key=len, reverse=True)
    return re.sub(rf"(?<![^.])({'|'.join(map(re.escape, longest_first))})(?![^.])", lambda found: names[found[0]], name)
