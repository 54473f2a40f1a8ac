"""Control requests on the asking side: replies of several workers, the way into the Engine, and what goes wrong."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pipeline_harness import until

from jaxserve.config import ServerArgs
from jaxserve.messages import DETOKENIZER, SCHEDULER, ControlReply, ControlRequest, WorkerAddress, pack, unpack
from jaxserve.scheduler.control.block_input import BlockInputReqInput, BlockInputReqOutput
from jaxserve.scheduler.control.continue_generation import ContinueGenerationReqInput
from jaxserve.scheduler.control.declaration import first_failure
from jaxserve.scheduler.control.flush_cache import FlushCacheReqInput, FlushCacheReqOutput
from jaxserve.scheduler.control.freeze_gc import FreezeGCReq, FreezeGCReqOutput
from jaxserve.scheduler.control.given_adapters import GivenAdapters
from jaxserve.scheduler.control.load_lora_adapter import LoadLoRAAdapterReqInput, LoRAUpdateOutput
from jaxserve.scheduler.control.load_lora_adapter_from_tensors import LoadLoRAAdapterFromTensorsReqInput
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqInput, PauseGenerationReqOutput
from jaxserve.scheduler.control.registry import control_of, controls
from jaxserve.scheduler.control.release_input import ReleaseInputReqOutput
from jaxserve.scheduler.control.release_memory_occupation import (
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
)
from jaxserve.scheduler.control.set_internal_state import SetInternalStateReq
from jaxserve.scheduler.control.slow_down import SlowDownReqInput, SlowDownReqOutput
from jaxserve.scheduler.control.unblock_input import UnblockInputReqInput, UnblockInputReqOutput
from jaxserve.scheduler.control.unload_lora_adapter import UnloadLoRAAdapterReqInput
from jaxserve.scheduler.control.update_weights_from_disk import (
    ServedWeights,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
)
from jaxserve.server.control import client as client_module
from jaxserve.server.control.client import ControlClient
from jaxserve.server.control.engine_methods import add_control_methods
from jaxserve.server.requests import RequestError

WORKERS = [WorkerAddress(SCHEDULER, 0), WorkerAddress(SCHEDULER, 1), WorkerAddress(DETOKENIZER)]


class Workers:
    """A WorkerLink to workers that answer as they are told, the last one first."""

    def __init__(self) -> None:
        self.workers = WORKERS
        self.asked: list[tuple[WorkerAddress, ControlRequest]] = []
        self.is_paused = False  # it is the TokenizerManager, too
        self.is_input_blocked = False
        self.weights = ServedWeights("start", "auto", "v1")
        self.released_memory: tuple[str, ...] = ()
        self.aborted: list[str] = []
        self.num_flushes = 0  # that routing has heard of
        self.client = ControlClient(self, self)  # type: ignore[arg-type]

    def send(self, worker: WorkerAddress, message: ControlRequest) -> None:
        self.asked.append((worker, message))

    def forget_caches(self) -> None:
        self.num_flushes += 1

    def abort_unsent(self, rid_prefix: str) -> None:
        self.aborted.append(rid_prefix)

    def answer(self, *bodies: msgspec.Struct | str) -> None:
        """A reply for each that was asked, or an error."""
        for (worker, message), body in reversed(list(zip(self.asked, bodies, strict=True))):
            reply = ControlReply(request_id=message.request_id, worker=worker)
            if isinstance(body, str):
                reply.error, reply.status_code = body, 400
            else:
                reply.body = pack(body)
            self.client.receive(reply)
            self.client.receive(reply)  # twice does no harm

    async def ask(self, request: Any, *bodies: msgspec.Struct | str) -> list[Any]:
        self.asked.clear()
        asking = asyncio.create_task(self.client.ask(request))
        await asyncio.sleep(0)
        self.answer(*bodies)
        return await asking


async def test_replies_are_gathered_by_rank() -> None:
    workers = Workers()
    replies = await workers.ask(FreezeGCReq(), *(FreezeGCReqOutput(i) for i in range(3)))
    assert [reply.num_frozen for reply in replies] == [0, 1, 2]
    assert [worker for worker, _ in workers.asked] == WORKERS


async def test_only_those_that_handle_it_are_asked_and_one_failure_is_shown() -> None:
    workers = Workers()
    replies = await workers.ask(FlushCacheReqInput(), FlushCacheReqOutput(True), FlushCacheReqOutput(False, "busy"))
    assert [worker for worker, _ in workers.asked] == WORKERS[:2]
    assert first_failure(replies).message == "scheduler 1: busy Done by: scheduler."


async def test_an_error_of_one_worker_is_the_answer_when_all_have_answered() -> None:
    with pytest.raises(RequestError, match=r"scheduler 1: not now Done by: scheduler\.") as caught:
        await Workers().ask(FlushCacheReqInput(), FlushCacheReqOutput(True), "not now")
    assert (caught.value.status_code, caught.value.err_type) == (400, "BadRequestError")


async def test_a_silent_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ANSWER_TIMEOUT_S", 0.02)
    workers = Workers()
    asking = asyncio.create_task(workers.client.ask(FreezeGCReq()))
    await asyncio.sleep(0)
    del workers.asked[1]
    workers.answer(FreezeGCReqOutput(1), FreezeGCReqOutput(1))
    with pytest.raises(RequestError, match=r"freeze_gc was not answered within 0.02 s by: scheduler 1\.") as caught:
        await asking
    assert caught.value.status_code == 503
    workers.answer(FreezeGCReqOutput(1), FreezeGCReqOutput(1))  # too late


async def test_a_failure_of_the_server_ends_the_waiting() -> None:
    workers = Workers()
    asking = asyncio.create_task(workers.client.ask(FreezeGCReq()))
    await asyncio.sleep(0)
    workers.client.fail_all("All is lost.")
    with pytest.raises(RequestError, match="All is lost"):
        await asking


async def test_a_worker_that_is_gone_is_not_waited_for() -> None:
    workers = Workers()
    asking = asyncio.create_task(workers.client.ask(FlushCacheReqInput()))
    await asyncio.sleep(0)
    workers.client.worker_gone(WORKERS[0], "It is gone.")
    del workers.asked[0]
    workers.answer(FlushCacheReqOutput(True))
    assert [reply.success for reply in await asking] == [True]
    asking = asyncio.create_task(workers.client.ask(FlushCacheReqInput()))
    await asyncio.sleep(0)
    for worker in WORKERS[:2]:
        workers.client.worker_gone(worker, "It is gone.")
    with pytest.raises(RequestError, match=r"It is gone\.") as caught:
        await asking
    assert caught.value.status_code == 503
    workers.workers = WORKERS[2:]
    with pytest.raises(RequestError, match="No replica is serving"):
        await workers.client.ask(FlushCacheReqInput())


NEW = WorkerAddress(SCHEDULER, 1, 1)


class Newcomer:
    """A replica that is told what it missed; it answers in its own time."""

    def __init__(self, workers: Workers, num_told: int = 0) -> None:
        self.workers = workers
        self.told: list[str] = []
        workers.asked.clear()
        self.coming = asyncio.create_task(workers.client.bring_up_to_date(NEW, num_told))

    async def answer_all(self) -> list[str]:
        while not self.coming.done():
            await asyncio.sleep(0)
            for worker, message in self.workers.asked:
                if worker == NEW:
                    self.told.append(message.name)
                    self.workers.client.receive(
                        ControlReply(request_id=message.request_id, worker=NEW, error="Never heard of it.")
                    )
            self.workers.asked = [(worker, message) for worker, message in self.workers.asked if worker != NEW]
        return self.told


async def test_a_new_replica_is_told_what_lasts() -> None:
    workers = Workers()
    weights, slow = UpdateWeightFromDiskReqOutput(True, ""), SlowDownReqOutput(0.1)
    for folder in ("one", "two"):
        await workers.ask(UpdateWeightFromDiskReqInput(model_path=folder), weights, weights)
        await workers.ask(SlowDownReqInput(forward_sleep_time=0.1), slow, slow)
    await workers.ask(UpdateWeightFromDiskReqInput(model_path="bad"), weights, UpdateWeightFromDiskReqOutput(False, "No."))
    await workers.ask(FlushCacheReqInput(), FlushCacheReqOutput(True), FlushCacheReqOutput(True))
    newcomer = Newcomer(workers)
    assert await newcomer.answer_all() == ["update_weights_from_disk", "slow_down"], "the newest weights, and each other once"
    assert await newcomer.coming == 4
    assert await Newcomer(workers, num_told=4).answer_all() == []
    assert await Newcomer(workers, num_told=3).answer_all() == ["slow_down"]


async def test_a_new_replica_waits_for_what_is_being_carried_out() -> None:
    workers = Workers()
    asking = asyncio.create_task(workers.client.ask(SlowDownReqInput(forward_sleep_time=0.2)))
    await asyncio.sleep(0)
    asked = list(workers.asked)
    newcomer = Newcomer(workers)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not newcomer.coming.done() and not workers.asked
    for worker, message in asked:
        reply = ControlReply(request_id=message.request_id, worker=worker, body=pack(SlowDownReqOutput(0.2)))
        workers.client.receive(reply)
    await asking
    assert await newcomer.answer_all() == ["slow_down"]


async def test_the_tokenizer_manager_takes_part_first() -> None:
    workers = Workers()
    await workers.ask(PauseGenerationReqInput(), PauseGenerationReqOutput(), PauseGenerationReqOutput())
    assert workers.is_paused
    assert workers.aborted == [""]
    workers.asked.clear()
    await workers.ask(ContinueGenerationReqInput(), *[msgspec.convert({}, control_of(ContinueGenerationReqInput).reply)] * 2)
    assert not workers.is_paused


@pytest.mark.parametrize("success", [True, False])
async def test_what_takes_long_is_waited_for_and_noted_when_all_have_done_it(
    monkeypatch: pytest.MonkeyPatch, success: bool
) -> None:
    monkeypatch.setattr(client_module, "ANSWER_TIMEOUT_S", 0.02)
    workers = Workers()
    request = UpdateWeightFromDiskReqInput(model_path="folder", weight_version="v2")
    asking = asyncio.create_task(workers.client.ask(request))
    await asyncio.sleep(0.05)
    workers.answer(UpdateWeightFromDiskReqOutput(True, ""), UpdateWeightFromDiskReqOutput(success, ""))
    await asking
    assert workers.weights == (ServedWeights("folder", "auto", "v2") if success else ServedWeights("start", "auto", "v1"))


async def test_memory_released_is_noted() -> None:
    workers = Workers()
    released = ReleaseMemoryOccupationReqOutput(("kv_cache", "weights"))
    await workers.ask(ReleaseMemoryOccupationReqInput(), released, released)
    assert workers.released_memory == ("kv_cache", "weights")
    replaced = UpdateWeightFromDiskReqOutput(True, "")
    await workers.ask(UpdateWeightFromDiskReqInput(model_path="folder"), replaced, replaced)
    assert workers.released_memory == ("kv_cache",)


async def test_values_that_python_let_through_are_refused_before_anything_happens() -> None:
    workers = Workers()
    with pytest.raises(RequestError, match="pause_generation is wrong: Invalid enum value 'never'"):
        await workers.client.ask(PauseGenerationReqInput(mode="never"))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="flush_cache is wrong"):
        await workers.client.ask(FlushCacheReqInput(timeout_s=-1.0))
    assert not workers.asked
    assert not workers.is_paused


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, "\ud800"])
async def test_values_that_no_message_can_hold_are_refused(value: Any) -> None:
    workers = Workers()
    with pytest.raises(RequestError, match="set_internal_state is wrong"):
        await workers.client.ask(SetInternalStateReq(server_args={"max_queued_requests": value}))
    assert not workers.asked


# --- asked as another one


class HasFolders(Workers):
    """A TokenizerManager that takes LoRA adapters."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.args = ServerArgs(model_path="m")
        self.lora_adapters: dict[str, str] = {}
        self.given_adapters = GivenAdapters()
        self.given_adapters.open(folder)

    async def load(self, *bodies: msgspec.Struct | str) -> list[Any]:
        self.asked.clear()
        request = LoadLoRAAdapterFromTensorsReqInput(lora_name="a", config_dict={"r": 1}, serialized_tensors=b"tensors")
        asking = asyncio.create_task(self.client.ask(request))
        await until(lambda: len(self.asked) == len(bodies))  # what is given is written in a thread
        self.answer(*bodies)
        return await asking


def is_there(request: LoadLoRAAdapterReqInput) -> bool:
    return Path(request.lora_path).is_dir()


async def test_workers_are_asked_for_what_a_request_stands_for(tmp_path: Path) -> None:
    workers = HasFolders(tmp_path)
    with pytest.raises(RequestError, match=r"scheduler 1: not here Done by: scheduler\."):
        await workers.load(LoRAUpdateOutput(True), "not here")
    asked = unpack(workers.asked[0][1].body, LoadLoRAAdapterReqInput)
    assert not is_there(asked) and not workers.lora_adapters
    assert len(await workers.load(LoRAUpdateOutput(True), LoRAUpdateOutput(True))) == 2
    assert [(message.name, unpack(message.body, type(asked))) for _, message in workers.asked] == [
        ("load_lora_adapter", asked)
    ] * 2
    assert workers.lora_adapters == {"a": asked.lora_path}
    workers.asked.clear()
    joining = asyncio.create_task(workers.client.bring_up_to_date(WORKERS[0]))
    await asyncio.sleep(0.01)
    ((_, message),) = workers.asked
    assert unpack(message.body, type(asked)) == asked, "who is started again finds the folder"
    workers.answer(LoRAUpdateOutput(True))
    assert await joining == 1
    with pytest.raises(RequestError, match="it is pinned here"):
        await workers.ask(UnloadLoRAAdapterReqInput(lora_name="a"), "it is pinned here", "it is pinned here")
    assert is_there(asked)
    await workers.ask(UnloadLoRAAdapterReqInput(lora_name="a"), LoRAUpdateOutput(True), LoRAUpdateOutput(True))
    assert not is_there(asked)


# --- what follows from a declaration


def test_every_declaration_is_found_and_consistent() -> None:
    assert {"flush_cache", "abort_request", "get_internal_state", "set_internal_state"} <= set(controls())
    assert {"pause_generation", "continue_generation", "slow_down", "freeze_gc"} <= set(controls())
    for name, control in controls().items():
        assert control.name == name
        assert control_of(control.request) is control
        assert control.handlers
        assert control.request.__doc__


async def test_the_engine_has_a_method_for_each() -> None:
    class Motor:
        def control(self, request: Any) -> Any:
            return request

        async def async_control(self, request: Any) -> Any:
            return request

    add_control_methods(Motor)
    motor: Any = Motor()
    assert motor.pause_generation() == PauseGenerationReqInput()
    assert (
        motor.pause_generation("retract") == motor.pause_generation(mode="retract") == PauseGenerationReqInput(mode="retract")
    )
    assert motor.flush_cache(timeout_s=2.0).timeout_s == 2.0
    assert str(inspect.signature(Motor.abort_request)) == "(self, rid=None, abort_all=None)"  # type: ignore[attr-defined]
    assert (await motor.async_unload_lora_adapter("a")) == UnloadLoRAAdapterReqInput(lora_name="a")
    assert str(inspect.signature(Motor.async_load_lora_adapter)) == "(self, lora_name, lora_path, pinned=False)"  # type: ignore[attr-defined]
    assert "New requests wait" in Motor.pause_generation.__doc__  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="spice"):
        motor.flush_cache(spice=1)


async def test_what_follows_is_asked_of_all_when_all_have_answered() -> None:
    workers = Workers()
    await workers.ask(BlockInputReqInput(), BlockInputReqOutput(), BlockInputReqOutput())
    assert workers.is_input_blocked
    workers.asked.clear()
    asking = asyncio.create_task(workers.client.ask(UnblockInputReqInput()))
    await asyncio.sleep(0)
    (first, second), names = workers.asked, lambda: [message.name for _, message in workers.asked]
    workers.asked[:] = [first]
    workers.answer(UnblockInputReqOutput())
    await asyncio.sleep(0.01)
    assert names() == ["unblock_input"], "one has not answered yet"
    workers.asked[:] = [second]
    workers.answer(UnblockInputReqOutput())
    workers.asked.clear()
    await asyncio.sleep(0.01)
    assert names() == ["release_input"] * 2 and workers.is_input_blocked and not asking.done()
    workers.answer(*[ReleaseInputReqOutput(is_blocked=False)] * 2)
    assert await asking == [UnblockInputReqOutput()] * 2
    assert not workers.is_input_blocked


async def test_a_new_worker_is_told_of_what_followed_too() -> None:
    workers = Workers()
    await workers.ask(BlockInputReqInput(), BlockInputReqOutput(), BlockInputReqOutput())
    asking = asyncio.create_task(workers.ask(UnblockInputReqInput(), UnblockInputReqOutput(), UnblockInputReqOutput()))
    await asyncio.sleep(0.01)
    joining = asyncio.create_task(workers.client.bring_up_to_date(WORKERS[0]))
    await asyncio.sleep(0.01)
    workers.asked[:2] = []
    workers.answer(*[ReleaseInputReqOutput(is_blocked=False)] * 2)
    workers.asked.clear()
    await asking
    told = []
    for reply in (BlockInputReqOutput(), UnblockInputReqOutput(), ReleaseInputReqOutput(is_blocked=False)):
        await asyncio.sleep(0.01)
        told += [message.name for _, message in workers.asked]
        workers.answer(reply)
        workers.asked.clear()
    assert await joining == 3
    assert told == ["block_input", "unblock_input", "release_input"]


def test_what_only_follows_is_no_method_of_an_engine() -> None:
    class Motor:
        def control(self, request: Any) -> Any:
            return request

    add_control_methods(Motor)
    assert hasattr(Motor, "unblock_input") and not hasattr(Motor, "release_input")
