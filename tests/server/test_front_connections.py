"""Connections on their way from the main process to fronts."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from pipeline_harness import until

from jaxserve.server.fronts.connections import ConnectionGiver, Welcome, connect, receive_connections
from jaxserve.server.fronts.shared import Shared
from jaxserve.server.launch import bind

WELCOME = Welcome(started_s=7, api_key="key", admin_api_key=None, ssl_keyfile_password="word")


class Fronts:
    """The main process and its fronts, all on one loop."""

    def __init__(self, folder: Path, num_fronts: int = 2) -> None:
        self.folder = folder
        self.listener = bind("127.0.0.1", 0)
        self.giver = ConnectionGiver(self.listener, WELCOME)
        self.shared = [Shared(front, num_fronts, 1) for front in (None, *range(num_fronts))]
        for one in self.shared:
            one.open(folder)
        self.giver.open(folder, self.shared[0].board)
        self.got: list[list[socket.socket]] = [[] for _ in range(num_fronts)]
        self.doors: dict[int, socket.socket] = {}

    async def come(self, rank: int) -> Welcome:
        door, welcome = await asyncio.to_thread(connect, self.folder)
        self.doors[rank] = door
        receive_connections(door, rank, self.got[rank].append)
        return welcome

    def open(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname()[:2], timeout=10)

    async def counts(self, total: int) -> list[int]:
        await until(lambda: sum(map(len, self.got)) >= total)
        return [len(got) for got in self.got]


async def test_fronts_learn_the_keys_where_they_come_in(folder: Path) -> None:
    fronts = Fronts(folder)
    assert await fronts.come(1) == WELCOME
    assert (folder / "connections.sock").stat().st_mode & 0o170000 == 0o140000


async def test_those_that_come_early_wait_and_all_are_shared_evenly(folder: Path) -> None:
    fronts = Fronts(folder)
    early = [fronts.open() for _ in range(10)]
    await asyncio.sleep(0.05)
    await fronts.come(0)
    assert await fronts.counts(10) == [10, 0]
    await fronts.come(1)
    later = [fronts.open() for _ in range(12)]
    assert await fronts.counts(22) == [11, 11]
    for number in range(11):  # all of front 1's end: the next eleven are for it
        fronts.got[1][number].close()
        fronts.shared[2].board.connection_closed()
    more = [fronts.open() for _ in range(11)]
    assert await fronts.counts(33) == [11, 22]
    client, served = more[-1], fronts.got[1][-1]
    client.sendall(b"hello")
    assert await asyncio.get_running_loop().sock_recv(served, 10) == b"hello"
    del early, later


async def test_a_front_that_is_gone_gets_none(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    fronts = Fronts(folder)
    for rank in (0, 1):
        await fronts.come(rank)
    asyncio.get_running_loop().remove_reader(fronts.doors[0])
    fronts.doors[0].close()
    clients = [fronts.open() for _ in range(4)]
    assert await fronts.counts(4) == [0, 4]
    assert "Front 0 takes no connection" in caplog.text
    del clients


async def test_nothing_is_accepted_any_more_when_it_is_closed(folder: Path) -> None:
    fronts = Fronts(folder)
    await fronts.come(0)
    fronts.giver.close()
    waiting = fronts.open()  # in the listener's queue
    await asyncio.sleep(0.05)
    assert await fronts.counts(0) == [0, 0]
    waiting.close()
