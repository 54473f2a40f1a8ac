"""What a FakeRunner holds, as far as commands change it.

Weights are a number. ReplaceWeights of a path makes it `weights_of(path)`; a path that begins with "bad" fails when it is
checked, one with "broken" while it is loaded. ReplaceTensors of a number makes it `weights_of(str(number))`; a negative one
fails when it is checked, LOST_TENSORS on the way. Of None it is `weights_of` all that was read, one behind the other; b"bad"
cannot be read, b"wrong" is refused when it is checked.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.commands import (
    MEMORY_TAGS,
    CheckTensors,
    CheckWeights,
    Command,
    CommandError,
    ForgetTensors,
    PullTensors,
    ReadTensors,
    ReleaseMemory,
    ReplaceTensors,
    ReplaceWeights,
    ResumeMemory,
    StartProfile,
    StopProfile,
    WeightsLost,
)

LOST_TENSORS = 13


def weights_of(path: str) -> int:
    return zlib.crc32(path.encode())


class FakeContents:
    def __init__(self, spans: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """`spans`: all that is annotated, as it comes; a profile has their names."""
        self._spans = spans
        self.weights = 0
        self.released: set[str] = set()
        self._read: list[bytes] = []
        self._profile: tuple[str, int] | None = None  # folder, and what was annotated before

    def carry_out(self, command: Command) -> None:
        match command:
            case CheckWeights(path) | ReplaceWeights(path):
                is_check = isinstance(command, CheckWeights)
                if path.startswith("bad") or (path.startswith("broken") and not is_check):
                    raise CommandError(f"{path} cannot be loaded.")
                if not is_check:
                    self.weights = weights_of(path)
                    self.released.discard("weights")
            case ReadTensors(files):
                if b"bad" in files:
                    raise CommandError("It cannot be read.")
                self._read += files
            case PullTensors(_, uuid):
                self._read.append(b"%d" % uuid)
            case ForgetTensors():
                self._read.clear()
            case CheckTensors(number):
                if b"wrong" in self._read if number is None else number < 0:
                    raise CommandError(f"{number} is wrong.")
            case ReplaceTensors(number):
                if number == LOST_TENSORS:
                    self.released.add("weights")
                    raise WeightsLost("The weights are gone.")
                self.weights = weights_of(b"".join(self._read).decode() if number is None else str(number))
                self.released.discard("weights")
            case ReleaseMemory(tags):
                assert not self.released & set(tags) and set(tags) <= set(MEMORY_TAGS)
                self.released |= set(tags)
            case StartProfile(folder):
                if self._profile is not None:
                    raise CommandError("Only one profile may be run at a time.")
                self._profile = folder, len(self._spans)
            case StopProfile(memory_file):
                assert self._profile is not None
                (folder, first), self._profile = self._profile, None
                Path(folder, "trace.txt").write_text("\n".join(name for name, _ in self._spans[first:]))
                if memory_file is not None:
                    Path(memory_file).touch()
            case ResumeMemory(tags):
                if not set(tags) <= self.released:
                    raise CommandError(f"Of {', '.join(tags)} something is not released.")
                self.released -= set(tags)
