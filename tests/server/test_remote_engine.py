"""RemoteEngine: what an Engine says, said by a server; and what goes wrong between here and there."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_answers import embeddings_of
from http_process import http_process
from server_process import Server, serving

import jaxserve
from jaxserve.scheduler.control.get_internal_state import GetInternalStateReq
from jaxserve.server.remote import RemoteEngine
from jaxserve.server.requests import RequestError
from jaxserve.types import SamplingParams

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = {"api_key": "k", "admin_api_key": "a", "weight_version": "v7"}
    with tempfile.TemporaryDirectory(prefix="remote-") as path, serving(Path(path), **options) as server:
        server.wait_for("/ready", 200)
        yield server
        server.stop()


@pytest.fixture
def engine(server: Server) -> RemoteEngine:
    return RemoteEngine(server.url, api_key="k", admin_api_key="a")


def test_generating(engine: RemoteEngine) -> None:
    assert jaxserve.RemoteEngine is RemoteEngine
    one: Any = engine.generate("Hello", GREEDY, rid="mine")
    assert (one["meta_info"]["id"], len(one["output_ids"]), one["meta_info"]["weight_version"]) == ("mine", 6, "v7")
    two: Any = engine.generate(input_ids=np.array([[5, 6], [7, 8]]), sampling_params=SamplingParams(max_new_tokens=2))
    assert [len(reply["output_ids"]) for reply in two] == [2, 2]
    streamed: list[Any] = list(engine.generate("Hello", GREEDY, stream=True))
    assert streamed[-1]["output_ids"] == one["output_ids"]
    assert streamed[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_prompts_of_embeddings(engine: RemoteEngine) -> None:
    """The fake runner takes an embedding for the token that its first number says."""
    ids = [[5, 6, 7], [8]]
    expected: Any = engine.generate(input_ids=ids, sampling_params=GREEDY)
    arrays = [embeddings_of(one).astype(ml_dtypes.bfloat16) for one in ids]
    for embeds in (arrays, [one.tolist() for one in arrays]):
        found: Any = engine.generate(input_embeds=embeds, sampling_params=GREEDY)
        assert [reply["output_ids"] for reply in found] == [reply["output_ids"] for reply in expected]
        assert [reply["text"] for reply in found] == [reply["text"] for reply in expected]
    with pytest.raises(RequestError, match=r"input_embeds\[0\] must have 2 numbers") as caught:
        engine.generate(input_embeds=np.zeros((1, 3)), sampling_params=GREEDY)
    assert caught.value.status_code == 400


async def test_generating_from_a_loop(engine: RemoteEngine) -> None:
    whole: Any = await engine.async_generate("Hello", GREEDY)
    events: Any = await engine.async_generate("Hello", GREEDY, stream=True)
    assert [event async for event in events][-1]["output_ids"] == whole["output_ids"]


def test_controlling(engine: RemoteEngine) -> None:
    assert engine.is_ready()
    assert engine.get_model_info()["weight_version"] == "v7"
    assert engine.get_server_info()["internal_states"][0]["num_running_reqs"] == 0
    assert "flushed" in engine.flush_cache(timeout_s=3.0).lower()
    assert engine.slow_down(0.0).forward_sleep_time is None
    assert engine.set_internal_state({"max_queued_requests": 7}) == [True]
    assert engine.open_session(1000, session_id="mine") == "mine"
    engine.close_session("mine")
    assert engine.pause_generation(mode="retract") is not None
    assert not engine.is_ready()
    assert engine.continue_generation() is not None
    assert engine.is_ready()
    with pytest.raises(RequestError, match="get_internal_state has no route"):
        engine.control(GetInternalStateReq())
    assert not hasattr(RemoteEngine, "get_internal_state")


def test_closing_a_stream_aborts_its_request(engine: RemoteEngine) -> None:
    stream: Any = engine.generate("Hello", {**GREEDY, "max_new_tokens": 400}, stream=True)
    next(stream)
    stream.close()
    deadline_s = time.monotonic() + 30
    while engine.get_server_info()["internal_states"][0]["num_running_reqs"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_what_is_refused(engine: RemoteEngine, server: Server) -> None:
    with pytest.raises(RequestError, match="top_p must be in") as caught:
        engine.generate("Hello", {"top_p": 5})
    assert (caught.value.status_code, caught.value.err_type) == (400, "BadRequestError")
    with pytest.raises(ValueError, match="top_p must be in"):  # also before a stream's first reply
        engine.generate("Hello", {"top_p": 5}, stream=True)
    with pytest.raises(RequestError, match="API key") as caught:
        RemoteEngine(server.url, api_key="k").flush_cache()
    assert caught.value.status_code == 401
    with pytest.raises(ValueError, match="is not the URL of a server"):
        RemoteEngine("localhost:30000")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionError, match="No server answers at"):
            RemoteEngine(f"http://127.0.0.1:{unused.getsockname()[1]}").generate("x")


def test_a_server_that_dies_in_a_stream() -> None:
    with http_process(256) as (process, url):
        stream: Any = RemoteEngine(url).generate("Hello", {"max_new_tokens": 100_000_000}, stream=True)
        next(stream)
        process.kill()
        with pytest.raises(ConnectionError):
            list(stream)
