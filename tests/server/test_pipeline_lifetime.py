"""How a pipeline starts, drains, fails and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import fake_scheduler
import psutil
import pytest
from pipeline_harness import collect, refused, request, running, running_on_threads, until

from jaxserve.config import ServerArgs
from jaxserve.demo import demo_model_path
from jaxserve.messages import DETOKENIZER, WorkerAddress
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqInput
from jaxserve.server.pipeline import Pipeline
from jaxserve.server.requests import RequestError
from jaxserve.server.worker import WorkerDiedError


async def test_drain_lets_running_requests_end() -> None:
    async with running() as pipeline:
        task = asyncio.create_task(collect(pipeline, request(max_new_tokens=300, ignore_eos=True)))
        await until(lambda: pipeline.manager.num_live)
        drain = asyncio.create_task(pipeline.drain(30.0))
        await asyncio.sleep(0)
        error = await refused(pipeline, request())
        assert (error.status_code, error.message) == (503, "The server is shutting down.")
        assert (await task)[0][-1].completion_tokens == 300
        assert await drain


@pytest.mark.parametrize("start", [running, running_on_threads])
async def test_drain_aborts_after_its_time(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    async with start() as pipeline:
        task = asyncio.create_task(collect(pipeline, request(max_new_tokens=400, ignore_eos=True)))
        await until(lambda: pipeline.manager.num_live)
        assert await pipeline.drain(0.2)
        reason = (await task)[0][-1].finish_reason
        assert reason is not None
        assert reason.type == "abort"


async def test_drain_ends_a_paused_server_at_once() -> None:
    async with running() as pipeline:
        await pipeline.manager.control(PauseGenerationReqInput(mode="retract"))
        task = asyncio.create_task(collect(pipeline, request()))
        await until(lambda: pipeline.manager.num_live)
        assert await asyncio.wait_for(pipeline.drain(60.0), 20)
        reason = (await task)[0][-1].finish_reason
        assert reason is not None
        assert reason.type == "abort"


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
async def test_a_killed_worker_ends_every_request(victim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    async with running() as pipeline:
        watch = asyncio.create_task(pipeline.watch())
        tasks = [asyncio.create_task(collect(pipeline, request(max_new_tokens=400, ignore_eos=True))) for _ in range(3)]
        await until(lambda: pipeline.manager.num_live == 3)
        os.kill(pipeline.workers.pids()[WorkerAddress(victim)], signal.SIGKILL)
        death = await asyncio.wait_for(watch, 10)
        assert f"The {victim} process was ended by SIGKILL" in str(death)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RequestError)
            assert result.status_code == 500
            assert result.message == f"The server's {victim} process ended. The request could not be finished."
        error = await refused(pipeline, request())
        assert error.status_code == 503
        assert error.message == f"The server has failed: The server's {victim} process ended."


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("user_error", "--model-path 'nowhere' does not exist."),
        ("crash", "The scheduler process failed: RuntimeError: the device is on fire"),
        ("exit", "ended with exit status 3"),
    ],
)
async def test_a_failed_start_says_why(kind: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SCHEDULER", kind)
    with pytest.raises(WorkerDiedError) as caught:
        async with running():
            pass
    assert words in str(caught.value)
    assert caught.value.is_user_error == (kind == "user_error")


async def test_a_folder_without_a_tokenizer_fails_the_start(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="holds no tokenizer files"):
        async with running(tokenizer_path=str(tmp_path)):
            pass


async def test_before_ready_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SCHEDULER", "hang")
    pipeline = Pipeline(ServerArgs(model_path=demo_model_path()), fake_scheduler.commands())
    await pipeline.start()
    ready = asyncio.create_task(pipeline.wait_ready())
    try:
        error = await refused(pipeline, request())
        assert (error.status_code, error.message) == (503, "The server is starting.")
        assert not ready.done()
    finally:
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)
        await pipeline.close()


async def test_a_hanging_step_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SCHEDULER", "hang_step")
    async with running(watchdog_timeout=1.0) as pipeline:
        watch = asyncio.create_task(pipeline.watch())
        task = asyncio.create_task(collect(pipeline, request()))
        death = await asyncio.wait_for(watch, 20)
        assert "--watchdog-timeout" in str(death)
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], RequestError)


async def test_the_main_process_and_the_detokenizer_know_no_jax_and_no_scheduler(pipeline: Pipeline) -> None:
    code = (
        "import sys, jaxserve.server.detokenizer, jaxserve.server.launch\n"
        "import jaxserve.server.http.uvicorn_server, jaxserve.server.engine\n"
        "from jaxserve.scheduler.control.registry import controls; controls()\n"
        "bad = {'jax', 'jaxlib', 'flax', 'torch', 'jaxserve.scheduler.batch', 'jaxserve.cache'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0
    maps = await asyncio.to_thread(psutil.Process(pipeline.workers.pids()[WorkerAddress(DETOKENIZER)]).memory_maps)
    assert not [m.path for m in maps if "jaxlib" in m.path or "libtorch" in m.path]
