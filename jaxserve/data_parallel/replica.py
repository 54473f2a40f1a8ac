"""Replica: whether it serves, and what it has to do as far as whoever sends it requests can know."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple


class ReplicaState(enum.Enum):
    JOINING = "joining"  # started, and not up to date yet: only probes go there
    UP = "up"
    DOWN = "down"


class Load(NamedTuple):
    """What it has to do, see Replica."""

    num_sequences: float = 0
    num_tokens: float = 0
    pending_prefill_tokens: float = 0
    pending_output_tokens: float = 0.0


@dataclasses.dataclass(eq=False, slots=True)
class Replica:
    rank: int
    state: ReplicaState = ReplicaState.JOINING
    num_sequences: int = 0  # that have not ended
    num_tokens: int = 0  # of their prompts
    pending_prefill_tokens: int = 0  # of prompts, cached ones left out, of which no output has come yet
    pending_output_tokens: float = 0.0  # that those sequences are expected to generate
    last_dispatch: int = -1  # number of the newest request it was sent

    @property
    def load(self) -> Load:
        return Load(self.num_sequences, self.num_tokens, self.pending_prefill_tokens, self.pending_output_tokens)

    def with_more(self, more: Load) -> Replica:
        """As it is if it has that to do as well."""
        summed = Load(*map(sum, zip(self.load, more, strict=True)))
        return dataclasses.replace(self, **summed._asdict())


@dataclasses.dataclass(eq=False, slots=True)
class Ticket:
    """One sequence's part in what a replica has to do. Whoever holds it says how the sequence fares."""

    replica: Replica
    prompt_tokens: int
    prefill_tokens: int
    output_tokens: float
    is_probe: bool = False  # which says nothing of how long outputs are

    def book(self) -> None:
        replica = self.replica
        replica.num_sequences += 1
        replica.num_tokens += self.prompt_tokens
        replica.pending_prefill_tokens += self.prefill_tokens
        replica.pending_output_tokens += self.output_tokens

    def first_token(self) -> None:
        """Its prompt is computed."""
        self.replica.pending_prefill_tokens -= self.prefill_tokens
        self.prefill_tokens = 0

    def end(self) -> None:
        self.first_token()
        replica = self.replica
        replica.num_sequences -= 1
        replica.num_tokens -= self.prompt_tokens
        replica.pending_output_tokens -= self.output_tokens
