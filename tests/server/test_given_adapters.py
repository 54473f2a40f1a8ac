"""LoRA adapters that come in requests: what is written for the schedulers, and when it goes again."""

from __future__ import annotations

import asyncio
import enum
import json
import pickle
import threading
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import fake_scheduler
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from pipeline_harness import running
from safetensors.numpy import load, load_file, save

from jaxserve.config import ServerArgs
from jaxserve.demo import demo_model_path
from jaxserve.scheduler.control.declaration import ControlError
from jaxserve.scheduler.control.given_adapters import GivenAdapter, GivenAdapters
from jaxserve.scheduler.control.load_lora_adapter import LoadLoRAAdapterReqInput
from jaxserve.scheduler.control.load_lora_adapter_from_tensors import LoadLoRAAdapterFromTensorsReqInput, check
from jaxserve.scheduler.control.unload_lora_adapter import UnloadLoRAAdapterReqInput
from jaxserve.server.engine import Engine
from jaxserve.server.named_tensors import as_file
from jaxserve.server.pipeline import Pipeline
from jaxserve.server.requests import RequestError

CONFIG = {"r": 1, "lora_alpha": 2, "target_modules": ["up_proj"]}
NAME = "base_model.model.model.layers.0.mlp.up_proj.lora_"
TENSORS = {f"{NAME}A.weight": np.ones((1, 2), np.float32), f"{NAME}B.weight": np.full((2, 1), 3, np.float32)}
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def request(name: str = "policy-1", **fields: Any) -> LoadLoRAAdapterFromTensorsReqInput:
    return LoadLoRAAdapterFromTensorsReqInput(
        **{"lora_name": name, "config_dict": CONFIG, "serialized_tensors": save(TENSORS), **fields}
    )


@pytest.fixture(scope="module", autouse=True)
def two_slots() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_SPEC", json.dumps({"num_adapter_slots": 2}))
        yield


@pytest.fixture(scope="module")
async def pipeline(two_slots: None) -> AsyncIterator[Pipeline]:
    async with running(enable_lora=True) as ready:
        yield ready


@pytest.fixture(autouse=True)
async def nothing_is_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    yield
    if "pipeline" in request.fixturenames:
        pipeline = request.getfixturevalue("pipeline")
        assert (folders(pipeline), pipeline.manager.lora_adapters) == ([], {})


def folders(pipeline: Pipeline) -> list[Path]:
    return list((pipeline.folder / "adapters").glob("*"))


async def unload(pipeline: Pipeline, name: str) -> None:
    (reply,) = await pipeline.manager.control(UnloadLoRAAdapterReqInput(lora_name=name))
    assert reply.success and name not in reply.loaded_adapters


@pytest.mark.parametrize("name", ["policy-1", "../../a b", "é" * 300])
async def test_a_folder_as_pefts_until_it_is_unloaded(pipeline: Pipeline, name: str) -> None:
    (reply,) = await pipeline.manager.control(request(name))
    (folder,) = folders(pipeline)
    assert reply.success and reply.loaded_adapters == pipeline.manager.lora_adapters == {name: str(folder)}
    assert json.loads((folder / "adapter_config.json").read_text()) == {"peft_type": "LORA", **CONFIG}
    np.testing.assert_equal(load_file(folder / "adapter_model.safetensors"), TENSORS)
    await unload(pipeline, name)


async def test_a_version_after_the_other(pipeline: Pipeline) -> None:
    for number in range(4):
        (reply,) = await pipeline.manager.control(request(f"policy-{number}"))
        if number:
            await unload(pipeline, f"policy-{number - 1}")
        assert len(folders(pipeline)) == 1
    assert list(reply.loaded_adapters) == ["policy-2", "policy-3"]
    await unload(pipeline, "policy-3")


async def test_a_name_is_loaded_once(pipeline: Pipeline) -> None:
    replies: list[Any] = await asyncio.gather(*(pipeline.manager.control(request()) for _ in range(3)), return_exceptions=True)
    assert [str(reply) for reply in replies[1:]] == ["The LoRA adapter 'policy-1' is being loaded."] * 2
    assert replies[0][0].success
    with pytest.raises(RequestError, match=r"'policy-1' is loaded already, from .*; unload it first"):
        await pipeline.manager.control(request())
    (folder,) = folders(pipeline)
    assert (folder / "adapter_config.json").exists()
    await pipeline.manager.control(LoadLoRAAdapterReqInput(lora_name="same folder", lora_path=str(folder)))
    await unload(pipeline, "same folder")
    assert folders(pipeline) == [folder], "it is the other one's"
    await unload(pipeline, "policy-1")


async def test_what_the_scheduler_refuses_leaves_nothing(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    await pipeline.manager.control(LoadLoRAAdapterReqInput(lora_name="pinned", lora_path="/x", pinned=True))
    with pytest.raises(RequestError, match="at most 1 may be"):
        await pipeline.manager.control(request("policy-2", pinned=True))
    assert not folders(pipeline)
    pipeline.manager.lora_adapters = {}  # a pinned one stays in the scheduler

    def is_full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(GivenAdapter, "write", is_full)
    with pytest.raises(RequestError, match=r"'policy-2' needs room in .*/adapters/\w+: No space left on device\.") as caught:
        await pipeline.manager.control(request("policy-2"))
    assert caught.value.status_code == 500


async def test_who_gives_up_while_it_is_written_leaves_nothing(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    write = GivenAdapter.write

    def slowly(given: GivenAdapter, config: dict[str, Any], tensors: bytes) -> None:
        began.set()
        may_end.wait(30)
        write(given, config, tensors)
        ended.set()

    monkeypatch.setattr(GivenAdapter, "write", slowly)
    asking = asyncio.create_task(pipeline.manager.control(request()))
    await asyncio.to_thread(began.wait, 30)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    may_end.set()
    await asyncio.to_thread(ended.wait, 30)


def test_nothing_is_written_behind_the_end(tmp_path: Path) -> None:
    given = GivenAdapters()
    given.open(tmp_path)
    one, other = given.add("a"), given.add("b")
    assert one is not None and other is not None and given.add("a") is None
    one.write({}, b"tensors")
    assert (one.folder / "adapter_model.safetensors").read_bytes() == b"tensors"
    given.close()
    other.write({}, b"tensors")
    assert not one.folder.exists() and not other.folder.exists()


def test_the_main_process_refuses_what_it_can() -> None:
    manager: Any = types.SimpleNamespace(lora_adapters={"a": "/a"}, args=ServerArgs(model_path="m"))
    assert check(manager, request(load_format="auto", added_tokens_config={})).success
    for fields, says in (
        ({"name": "a"}, r"'a' is loaded already, from /a; unload it first\."),
        ({"name": " "}, "lora_name must be printable"),
        ({"serialized_tensors": pickle.dumps(TENSORS)}, r"^serialized_tensors is a pickle, which could run any code here\."),
        ({"load_format": "flattened_bucket"}, "got 'flattened_bucket'"),
        ({"added_tokens_config": {"<x>": 1}}, "added_tokens_config must be null"),
    ):
        with pytest.raises(ControlError, match=says):
            check(manager, request(**fields))
    manager.args = ServerArgs(model_path="m", nnodes=2, tp_size=2, dist_init_addr="127.0.0.1:1")
    with pytest.raises(ControlError, match="must come by load_lora_adapter with --nnodes above 1"):
        check(manager, request())


# --- of an Engine


class Kind(enum.StrEnum):
    LORA = "LORA"


class Config:
    """As peft.LoraConfig."""

    def to_dict(self) -> dict[str, Any]:
        return {**CONFIG, "peft_type": Kind.LORA, "target_modules": {"up_proj"}, "revision": None}


def test_one_file_of_arrays() -> None:
    for kinds in ((torch.tensor, torch.tensor), (np.asarray, jnp.asarray)):
        file = as_file((name, kind(TENSORS[name])) for name, kind in zip(TENSORS, kinds, strict=True))
        np.testing.assert_equal(load(file), TENSORS)
    for tensors in ({}, {"a": np.ones(1), "b": torch.ones(1)}):
        with pytest.raises(ValueError, match="must be all of PyTorch, or all of NumPy and JAX; and at least one"):
            as_file(tensors)


async def test_an_engine_takes_tensors_and_pefts_config() -> None:
    with Engine(demo_model_path(), worker_commands=fake_scheduler.commands(), enable_lora=True) as engine:
        reply = engine.load_lora_adapter_from_tensors("policy-1", TENSORS, Config())
        folder = Path(reply.loaded_adapters["policy-1"])
        assert json.loads((folder / "adapter_config.json").read_text()) == {**CONFIG, "peft_type": "LORA", "revision": None}
        pairs = [(name, torch.tensor(tensor)) for name, tensor in TENSORS.items()]
        engine.load_lora_adapter_from_tensors("policy-2", pairs, CONFIG, "safetensors", True)
        assert engine.get_model_info()["lora_adapters"].keys() == {"policy-1", "policy-2"}
        texts = [engine.generate("a", GREEDY, lora_path=name)["text"] for name in (None, "policy-1")]  # type: ignore[index,call-overload]
        assert texts[0] != texts[1]
        assert (await engine.async_unload_lora_adapter("policy-1")).success
        assert (await engine.async_load_lora_adapter(lora_name="x", lora_path="/x")).loaded_adapters["x"] == "/x"
        with pytest.raises(RequestError, match="'policy-2' is pinned"):
            await engine.async_unload_lora_adapter("policy-2")
        with pytest.raises(ValueError, match=r"The tensor a is a list; it must be an array\."):
            engine.load_lora_adapter_from_tensors("a", {"a": [1.0]}, CONFIG)
        with pytest.raises(RequestError, match="is a pickle"):
            engine.control(request("y", serialized_tensors=pickle.dumps(1)))
