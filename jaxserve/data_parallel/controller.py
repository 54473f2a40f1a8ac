"""DataParallelController: sends each request to a replica, and keeps count of what each has to do.

    dispatch(prompt, ...) -> a Ticket per sequence -> ticket.first_token() -> ended(ticket, tokens)

Its counts are exact, not reported: whoever sends all requests and sees all ends knows. Where several processes send requests,
each has a controller, which is told what the others' count and where they sent which prompts. It asks a policy
(`jaxserve.data_parallel.policies`) unless the request names a rank, or would rather go where its session went.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from jaxserve.data_parallel.policies import LoadBalancePolicy
from jaxserve.data_parallel.prompt import Prompt
from jaxserve.data_parallel.replica import Load, Replica, ReplicaState, Ticket

# How long outputs are before any has ended, and how much each that ends counts towards the mean.
_FIRST_MEAN_OUTPUT, _WEIGHT_OF_NEWEST = 128.0, 0.02


class ReplicaUnavailableError(Exception):
    """Nobody can take the request: one sentence."""


class DataParallelController:
    def __init__(
        self,
        policy: LoadBalancePolicy,
        num_replicas: int,
        *,
        others_loads: Callable[[], Sequence[Load]] | None = None,
        tell_others: Callable[[int, Prompt], None] | None = None,
    ) -> None:
        """`others_loads`: what other controllers have sent to each replica; `tell_others` of a rank that got a prompt. None:
        there are no others."""
        self._policy = policy
        self._others_loads = others_loads
        self._tell_others = tell_others
        self._mean_output = _FIRST_MEAN_OUTPUT
        self._dispatches = itertools.count()
        self.replicas = [Replica(rank) for rank in range(num_replicas)]

    # --- who serves

    @property
    def up(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state is ReplicaState.UP]

    def join(self, rank: int) -> None:
        """A new process has the rank of one that is down."""
        self.replicas[rank] = Replica(rank)

    def set_up(self, rank: int, cache_tokens: int | None = None) -> None:
        """It takes requests; `cache_tokens`: the size of its KV cache."""
        self.replicas[rank].state = ReplicaState.UP
        if cache_tokens is not None:
            self._policy.set_capacity(rank, cache_tokens)

    def set_down(self, rank: int) -> None:
        """Tickets for it may still be returned; they count no more."""
        self.replicas[rank] = Replica(rank, ReplicaState.DOWN)
        self._policy.forget(rank)

    def forget_caches(self) -> None:
        """All replicas flushed theirs."""
        for replica in self.replicas:
            self._policy.forget(replica.rank)

    # --- requests

    def others_dispatched(self, rank: int, prompt: Prompt) -> None:
        """Another controller sent the replica a prompt."""
        self._policy.dispatched(self.replicas[rank], prompt)

    def dispatch(
        self,
        prompt: Prompt,
        max_new_tokens: Sequence[int | None],
        *,
        rank: int | None = None,
        preferred: int | None = None,
        is_probe: bool = False,
    ) -> list[Ticket]:
        """Tickets for the sequences of one prompt, all of one replica; `max_new_tokens` has an entry for each.

        `rank`: that one or none. `preferred`: that one if it serves. `is_probe`: also one that is joining.
        Raises ReplicaUnavailableError.
        """
        replica = self._choose(prompt, rank, preferred, is_probe)
        replica.last_dispatch = next(self._dispatches)
        missing = prompt.length - self._policy.dispatched(replica, prompt)
        if self._tell_others is not None and len(self.replicas) > 1:
            self._tell_others(replica.rank, prompt)
        tickets = []
        for limit in max_new_tokens:
            expected = self._mean_output if limit is None else min(self._mean_output, limit)
            tickets.append(Ticket(replica, prompt.length, missing, expected, is_probe))
            tickets[-1].book()
            missing = 0  # the others find it in the cache
        return tickets

    def ended(self, ticket: Ticket, num_outputs: int) -> None:
        """Its sequence has, with so many tokens."""
        ticket.end()
        if not ticket.is_probe:
            self._mean_output += _WEIGHT_OF_NEWEST * (num_outputs - self._mean_output)

    def _choose(self, prompt: Prompt, rank: int | None, preferred: int | None, is_probe: bool) -> Replica:
        if rank is not None:
            replica = self.replicas[rank]
            if replica.state is ReplicaState.UP or (is_probe and replica.state is ReplicaState.JOINING):
                return replica
            raise ReplicaUnavailableError(f"Replica {rank} is not serving at the moment.")
        if preferred is not None and self.replicas[preferred].state is ReplicaState.UP:
            return self.replicas[preferred]
        candidates = self.up
        if not candidates:
            raise ReplicaUnavailableError("No replica is serving at the moment.")
        if len(candidates) == 1:
            return candidates[0]
        if self._others_loads is not None:
            more = self._others_loads()
            candidates = [replica.with_more(more[replica.rank]) for replica in candidates]
        return self.replicas[self._policy.choose(candidates, prompt).rank]
