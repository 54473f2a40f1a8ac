"""What processes with fronts share: numbers, rids, and what they tell each other of replicas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxserve.data_parallel import DataParallelController, Prompt, make_policy
from jaxserve.data_parallel.prompt import BLOCK_TOKENS
from jaxserve.server.fronts.shared import Shared


def processes(folder: Path, num_fronts: int, num_replicas: int) -> list[Shared]:
    """The main process's view, and each front's."""
    shared = [Shared(front, num_fronts, num_replicas) for front in (None, *range(num_fronts))]
    for one in shared:
        one.open(folder)
    return shared


def controller(shared: Shared, method: str, num_replicas: int = 2) -> DataParallelController:
    made = DataParallelController(make_policy(method, num_replicas), num_replicas, others_loads=shared.others_loads)
    for rank in range(num_replicas):
        made.set_up(rank, 1 << 16)
    return made


def prompt(start: int = 0, length: int = 10 * BLOCK_TOKENS) -> Prompt:
    return Prompt(np.arange(start, start + length, dtype=np.int32))


def test_each_process_sees_what_the_others_have_to_do(folder: Path) -> None:
    main, first, second = processes(folder, 2, 2)
    controllers = [controller(one, "shortest_queue") for one in (first, second)]
    for rank, count in ((0, 3), (1, 1)):
        for _ in range(count):
            controllers[0].dispatch(prompt(length=7), [5], rank=rank)
    first.write(4, controllers[0].replicas)
    second.write(2, controllers[1].replicas)
    assert main.num_live(own=1) == 7
    assert first.num_live(own=4) == 6
    assert [load.num_sequences for load in main.others_loads()] == [3, 1]
    assert [load.num_tokens for load in second.others_loads()] == [21, 7]
    assert first.others_loads()[0].num_sequences == 0


def test_connections_that_ended_are_counted_per_front(folder: Path) -> None:
    main, first, second = processes(folder, 2, 1)
    first.board.connection_closed()
    for _ in range(3):
        second.board.connection_closed()
    assert [main.board.num_closed(front) for front in (0, 1)] == [1, 3]


@pytest.mark.parametrize("method", ["shortest_queue", "total_tokens", "cache_aware"])
def test_a_front_sends_nothing_to_a_replica_that_another_has_filled(folder: Path, method: str) -> None:
    _, first, second = processes(folder, 2, 2)
    mine, others = controller(first, method), controller(second, method)
    for i in range(10):
        others.dispatch(prompt(1000 * (i + 1)), [100], rank=0)
    second.write(10, others.replicas)
    tickets = [mine.dispatch(prompt(100_000 + 1000 * i), [100])[0] for i in range(8)]
    assert {ticket.replica.rank for ticket in tickets} == {1}
    assert all(ticket.replica is mine.replicas[1] for ticket in tickets), "tickets are of the controller's own replicas"


def test_a_front_learns_what_others_made_replicas_compute(folder: Path) -> None:
    main, first, _ = processes(folder, 2, 2)
    told: list[tuple[int, list[int]]] = []
    sender = DataParallelController(
        make_policy("cache_aware", 2),
        2,
        others_loads=main.others_loads,
        tell_others=lambda rank, prompt: told.append((rank, prompt.hashes)),
    )
    sender.set_up(0)
    sender.set_up(1)
    sender.dispatch(prompt(), [1], rank=1)
    ((rank, hashes),) = told
    learner = controller(first, "cache_aware")
    learner.others_dispatched(rank, Prompt.of_hashes(np.array(hashes, np.uint64)))
    assert learner.dispatch(prompt(), [1])[0].replica.rank == 1
    assert learner.replicas[1].pending_prefill_tokens == 0, "it is cached there"


def test_a_rid_belongs_to_one_process_at_a_time(folder: Path) -> None:
    first = processes(folder, 2, 1)[1]
    # Locks are of processes: another one is needed to see them.
    script = (
        "import sys; from pathlib import Path; from jaxserve.server.fronts.rid_locks import RidLocks\n"
        "locks = RidLocks(Path(sys.argv[1]))\n"
        "for line in sys.stdin:\n"
        "    what, rid = line.split()\n"
        "    print(getattr(locks, what)(rid), flush=True)\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdin is not None and other.stdout is not None

    def ask(what: str, rid: str) -> str:
        assert other.stdin is not None and other.stdout is not None
        other.stdin.write(f"{what} {rid}\n")
        other.stdin.flush()
        return other.stdout.readline().strip()

    try:
        assert first.take_rids(["a", "b"]) is None
        assert ask("take", "a") == "False"
        assert ask("take", "c") == "True"
        assert first.take_rids(["d", "c", "e"]) == "c"
        assert ask("take", "d") == "True", "of those that it could not have all, it keeps none"
        first.free_rid("a")
        assert ask("take", "a") == "True"
        assert ask("free", "c") == "None"
        assert first.take_rids(["c"]) is None
    finally:
        other.kill()
        other.wait()
    assert first.take_rids(["a", "d"]) is None, "those of a process that died are free"
