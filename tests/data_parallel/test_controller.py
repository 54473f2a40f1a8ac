"""Who gets a request, and what is counted meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.config.names import LOAD_BALANCE_METHODS
from jaxserve.data_parallel import (
    DataParallelController,
    Prompt,
    Replica,
    ReplicaState,
    ReplicaUnavailableError,
    Ticket,
    make_policy,
)


def controller(method: str, count: int = 4, **options: Any) -> DataParallelController:
    made = DataParallelController(make_policy(method, count, **options), count)
    for rank in range(count):
        made.set_up(rank)
    return made


def prompt(length: int, first: int = 0) -> Prompt:
    return Prompt(np.arange(first, first + length, dtype=np.int32))


def send(
    made: DataParallelController, length: int = 10, first: int = 0, n: int = 1, limit: int | None = 8, **to: Any
) -> Ticket:
    return made.dispatch(prompt(length, first), [limit] * n, **to)[0]


def books(made: DataParallelController) -> list[tuple[float, ...]]:
    return [(r.num_sequences, r.num_tokens, r.pending_prefill_tokens, r.pending_output_tokens) for r in made.replicas]


@pytest.mark.parametrize("method", LOAD_BALANCE_METHODS)
def test_equal_requests_are_spread_evenly(method: str) -> None:
    made = controller(method)
    tickets = [send(made, first=1000 * i) for i in range(40)]
    assert [sum(t.replica.rank == rank for t in tickets) for rank in range(4)] == [10] * 4
    for ticket in tickets:
        ticket.first_token()
        made.ended(ticket, 8)
    assert books(made) == [(0, 0, 0, 0)] * 4
    tickets = [send(made, first=10**6 + 1000 * i) for i in range(4)]
    assert sorted(t.replica.rank for t in tickets) == [0, 1, 2, 3], "idle ones take turns"


def test_counts_follow_a_request() -> None:
    made = controller("cache_aware", 1)
    first, second = made.dispatch(prompt(100), [8, None])
    assert (first.replica.num_sequences, first.replica.num_tokens) == (2, 200)
    assert first.replica.pending_prefill_tokens == 100, "samples of a prompt share it"
    assert first.replica.pending_output_tokens == 8 + 128
    first.first_token()
    first.first_token()
    assert first.replica.pending_prefill_tokens == 0
    made.ended(second, 28)
    assert books(made) == [(1, 100, 0, 8)]
    made.ended(first, 8)
    assert books(made) == [(0, 0, 0, 0)]
    assert send(made, limit=None).output_tokens < 128, "the mean has moved"
    moved = send(made, limit=None).output_tokens
    made.ended(send(made, rank=0, is_probe=True), 1)
    assert send(made, limit=None).output_tokens == moved, "but not by probes"


def test_shortest_queue_counts_requests_and_total_tokens_tokens() -> None:
    for method, expected in (("shortest_queue", 1), ("total_requests", 1), ("total_tokens", 0)):
        made = controller(method, 2)
        send(made, 10, rank=0)
        send(made, 10, rank=0)
        send(made, 1000, rank=1)
        assert send(made).replica.rank == expected, method


def test_round_robin_looks_at_nothing() -> None:
    made = controller("round_robin", 3)
    assert [send(made, 10 ** (i % 3)).replica.rank for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_prefix_stays_where_it_is_until_the_queue_there_costs_more() -> None:
    made = controller("cache_aware", 2)
    shared = 640
    ticket = send(made, shared)
    home = ticket.replica
    ticket.first_token()
    made.ended(ticket, 8)
    tickets = [send(made, shared, limit=100)]
    while tickets[-1].replica is home:
        tickets.append(send(made, shared, limit=100))
    assert len(tickets) in (13, 14), "then it is computed at the other place once more"
    assert tickets[-1].prefill_tokens == shared
    for ticket in tickets:
        made.ended(ticket, 100)
    assert {send(made, shared).replica.rank for _ in range(2)} == {0, 1}, "both have it"


def test_conversations_stay_and_others_do_not_follow() -> None:
    made = controller("cache_aware", 4)
    homes: dict[int, set[int]] = {}
    for turn in range(1, 6):
        for conversation in range(12):
            ticket = send(made, 64 * turn, first=10_000 * conversation)
            homes.setdefault(conversation, set()).add(ticket.replica.rank)
            made.ended(ticket, 8)
    assert all(len(ranks) == 1 for ranks in homes.values())
    assert sorted([rank for (rank,) in homes.values()]) == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_auto_is_by_load_where_nothing_is_cached() -> None:
    made = controller("auto", 2, has_prefix_cache=False)
    assert [send(made, 640).replica.rank for _ in range(4)] == [0, 1, 0, 1]


def test_a_rank_is_served_there_or_not_at_all_and_a_preference_where_it_can_be() -> None:
    made = controller("cache_aware", 3)
    assert send(made, rank=2).replica.rank == 2
    assert send(made, preferred=2).replica.rank == 2
    made.set_down(2)
    with pytest.raises(ReplicaUnavailableError, match=r"Replica 2 is not serving at the moment\."):
        send(made, rank=2)
    assert send(made, preferred=2).replica.rank != 2
    made.join(2)
    with pytest.raises(ReplicaUnavailableError):
        send(made, rank=2)
    assert send(made, rank=2, is_probe=True).replica.rank == 2
    for rank in range(3):
        made.set_down(rank)
    with pytest.raises(ReplicaUnavailableError, match="No replica is serving"):
        send(made)


def test_a_replica_that_comes_back_begins_with_nothing() -> None:
    made = controller("cache_aware", 2)
    ticket = send(made, 640)
    rank = ticket.replica.rank
    made.set_down(rank)
    made.join(rank)
    made.set_up(rank, cache_tokens=10_000)
    made.ended(ticket, 3)
    assert books(made) == [(0, 0, 0, 0)] * 2, "tickets of the one before count no more"
    assert send(made, 640).prefill_tokens == 640, "nor does what it had cached"
    assert made.replicas[rank].state is ReplicaState.UP


def test_what_does_not_fit_the_cache_is_not_expected_there() -> None:
    made = controller("cache_aware", 2)
    for rank in range(2):
        made.set_up(rank, cache_tokens=320)
    made.ended(send(made, 640), 8)
    assert send(made, 640, rank=0).prefill_tokens >= 320
    made.forget_caches()
    assert send(made, 640, rank=0).prefill_tokens == 640


def test_one_replica_costs_no_thought() -> None:
    made = controller("cache_aware", 1)
    given = prompt(10_000)
    made.dispatch(given, [None])
    assert given._hashes is None


def test_a_ticket_belongs_to_one_replica() -> None:
    replica = Replica(3)
    ticket = Ticket(replica, 5, 4, 2.0)
    ticket.book()
    ticket.end()
    assert (replica.num_sequences, replica.num_tokens, replica.pending_output_tokens) == (0, 0, 0)
