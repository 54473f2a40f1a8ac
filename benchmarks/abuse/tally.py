"""What the abuse has been answered: counts by kind of request, and what should never have been.

An outcome is a status ("200", "400", ...), or a word: "left" (we closed the connection), "closed" (the server did, without a
reply), "away" (the server was being killed). What fails the run is a `Failure`; it is kept with its evidence.
"""

from __future__ import annotations

import collections
import dataclasses
import time

_KEPT_PER_KIND = 5  # failures shown with their evidence; all are counted
_EVIDENCE_CHARS = 600

# Replies with status 5xx that a server under abuse is meant to give, by what their sentence says.
_MEANT = (
    "queue is full",
    "shutting down",
    "draining",
    "is starting",
    "timed out",
    "memory is released",
    "released",
    "is busy",
    "too many",
    "paused",  # by an operator: /ready
)


@dataclasses.dataclass(frozen=True)
class Failure:
    kind: str
    what: str
    evidence: str
    at_s: float


@dataclasses.dataclass
class Tally:
    started_s: float = dataclasses.field(default_factory=time.monotonic)
    outcomes: dict[str, collections.Counter[str]] = dataclasses.field(default_factory=dict)
    meant_5xx: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    examples: list[Failure] = dataclasses.field(default_factory=list)

    def note(self, kind: str, outcome: str) -> None:
        self.outcomes.setdefault(kind, collections.Counter())[outcome] += 1

    def fail(self, kind: str, what: str, evidence: object = "") -> None:
        """Counts a failure; of each kind and sentence the first few are kept."""
        name = f"{kind}: {what}"
        self.failures[name] += 1
        if self.failures[name] <= _KEPT_PER_KIND:
            text = evidence if isinstance(evidence, str) else repr(evidence)
            self.examples.append(Failure(kind, what, text[:_EVIDENCE_CHARS], round(time.monotonic() - self.started_s, 1)))

    def note_status(self, kind: str, status: int, body: bytes, request: bytes) -> None:
        """Counts a reply. A 5xx fails unless it says one of the things it is meant to say."""
        self.note(kind, str(status))
        if status < 500:
            return
        text = body.decode(errors="replace")
        meant = next((words for words in _MEANT if words in text.lower()), None) if status == 503 else None
        if meant is not None:
            self.meant_5xx[f"{status} {meant}"] += 1
        else:
            self.fail(kind, f"status {status}", f"{text[:250]!r} to {request[:300]!r}")

    def requests(self) -> int:
        return sum(sum(counts.values()) for counts in self.outcomes.values())
