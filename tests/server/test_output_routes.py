"""Which detokenizers a process uses."""

from __future__ import annotations

import pytest

from jaxserve.config import ServerArgs
from jaxserve.messages import FRONT, TOKENIZER, Route, WorkerAddress
from jaxserve.server.output_routes import Routes, fronts_of


def ranks(routes: Routes, count: int) -> list[int]:
    return [routes.next().detokenizer for _ in range(count)]


def test_the_main_process_uses_all_in_turn() -> None:
    assert Routes().next() == Route()
    assert ranks(Routes(num_detokenizers=3), 7) == [0, 1, 2, 0, 1, 2, 0]
    assert ranks(Routes(None, 4, 2), 3) == [0, 1, 0]


def test_fronts_share_them_out() -> None:
    assert [ranks(Routes(front, 5, 2), 2) for front in range(5)] == [[0, 0], [1, 1], [0, 0], [1, 1], [0, 0]]
    assert [ranks(Routes(front, 2, 2), 2) for front in range(2)] == [[0, 0], [1, 1]]
    assert [ranks(Routes(front, 2, 5), 4) for front in range(2)] == [[0, 2, 4, 0], [1, 3, 1, 3]]


@pytest.mark.parametrize("num_fronts", [1, 2, 3, 7])
@pytest.mark.parametrize("num_detokenizers", [1, 2, 3, 7])
def test_all_are_used_and_the_reader_is_who_asked(num_fronts: int, num_detokenizers: int) -> None:
    used = set()
    for front in range(num_fronts):
        routes = Routes(front, num_fronts, num_detokenizers)
        for route in [routes.next() for _ in range(num_detokenizers)]:
            assert route.front == front and route.reader == WorkerAddress(FRONT, front)
            used.add(route.detokenizer)
    assert used == set(range(num_detokenizers))
    assert Routes().next().reader == WorkerAddress(TOKENIZER)


def test_one_tokenizer_worker_is_the_main_process() -> None:
    assert fronts_of(ServerArgs()) == []
    assert fronts_of(ServerArgs(tokenizer_worker_num=2)) == [WorkerAddress(FRONT), WorkerAddress(FRONT, 1)]
