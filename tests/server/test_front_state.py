"""How fronts learn of the main process's state."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from pipeline_harness import until

from jaxserve.messages import FRONT, SCHEDULER, Message, WorkerAddress, decoder, encode
from jaxserve.scheduler.control.update_weights_from_disk import ServedWeights
from jaxserve.server.fronts.main_state import FrontInput, MainState, MainStateTaken, ReplicaFacts, StateTeller

FRONTS = [WorkerAddress(FRONT, 0), WorkerAddress(FRONT, 1)]
STATE = MainState(
    status="ready",
    failure="",
    is_paused=False,
    is_input_blocked=False,
    released_memory=(),
    weights=ServedWeights("model", "auto", "default"),
    lora_adapters={"sql": "/adapters/sql"},
    replicas=[ReplicaFacts("up", WorkerAddress(SCHEDULER, 0, 2), 640), ReplicaFacts("down", None, 0, "It died.")],
    model={"context_len": 512},
)


class Heard:
    """Two fronts; one answers only when it is told to."""

    def __init__(self) -> None:
        self.state = STATE
        self.sent: list[tuple[WorkerAddress, Any]] = []
        self.teller = StateTeller(FRONTS, lambda: self.state, self.send)
        self.silent: set[WorkerAddress] = set()

    def send(self, to: WorkerAddress, message: Message) -> None:
        self.sent.append((to, decoder(FrontInput).decode(encode(message))))
        if to not in self.silent:
            asyncio.get_running_loop().call_soon(self.take, to)

    def take(self, front: WorkerAddress) -> None:
        newest = [message for to, message in self.sent if to == front][-1]
        self.teller.taken(MainStateTaken(front=front, number=newest.number))

    def numbers(self, front: WorkerAddress) -> list[int]:
        return [message.number for to, message in self.sent if to == front]


async def test_each_change_is_told_once_and_whole() -> None:
    heard = Heard()
    await heard.teller.told(FRONTS)
    await heard.teller.told(FRONTS)
    heard.state = msgspec.structs.replace(STATE, is_paused=True)
    await heard.teller.told(FRONTS)
    assert [heard.numbers(front) for front in FRONTS] == [[1, 2], [1, 2]]
    assert heard.sent[0] == (FRONTS[0], msgspec.structs.replace(STATE, number=1))


async def test_who_tells_waits_for_all() -> None:
    heard = Heard()
    heard.silent = {FRONTS[1]}
    telling = asyncio.create_task(heard.teller.told(FRONTS))
    await asyncio.sleep(0.05)
    assert not telling.done()
    heard.take(FRONTS[1])
    await asyncio.wait_for(telling, 1)


async def test_a_front_that_hangs_is_not_waited_for_without_end() -> None:
    heard = Heard()
    heard.silent = {FRONTS[0]}
    began_s = time.monotonic()
    await heard.teller.told(FRONTS, patience_s=0.2)
    assert 0.2 <= time.monotonic() - began_s < 5


async def test_a_front_that_is_gone_is_not_waited_for() -> None:
    heard = Heard()
    heard.silent = {FRONTS[0]}
    await asyncio.wait_for(heard.teller.told(FRONTS[1:]), 1)


async def test_what_changes_by_itself_is_told_soon() -> None:
    heard = Heard()
    heard.teller.start()
    try:
        await asyncio.sleep(0.05)
        heard.state = msgspec.structs.replace(STATE, status="failed", failure="It is broken.")
        await until(lambda: heard.numbers(FRONTS[0]) == [1, 2])
    finally:
        heard.teller.close()
