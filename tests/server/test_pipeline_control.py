"""Aborts, pauses and other control requests to a running pipeline."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from typing import Any

import pytest
from pipeline_harness import collect, internal_state, request, until

from jaxserve.scheduler.control.abort_request import AbortRequest
from jaxserve.scheduler.control.continue_generation import ContinueGenerationReqInput
from jaxserve.scheduler.control.flush_cache import FlushCacheReqInput, FlushCacheReqOutput
from jaxserve.scheduler.control.freeze_gc import FreezeGCReq
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqInput
from jaxserve.scheduler.control.set_internal_state import SetInternalStateReq
from jaxserve.server.pipeline import Pipeline
from jaxserve.server.requests import GenerationChunk, RequestError


async def test_closing_early_aborts_only_that_request(pipeline: Pipeline) -> None:
    """Also when the rid of one is the beginning of another's."""
    long = {"max_new_tokens": 450, "ignore_eos": True, "stream": True}
    short = pipeline.manager.generate(request(rids=["job"], **long))
    other = pipeline.manager.generate(request(rids=["job-2"], **long))
    await anext(short)
    await anext(other)
    await short.aclose()
    chunks = [chunk async for chunk in other]
    assert chunks[-1].finish_reason is not None
    assert chunks[-1].finish_reason.type == "length"
    await until(lambda: not pipeline.manager.num_live)
    state = await internal_state(pipeline)
    assert state["num_running_reqs"] == 0


async def test_abort_by_prefix_and_abort_all(pipeline: Pipeline) -> None:
    def start(rid: str) -> asyncio.Task[dict[int, list[GenerationChunk]]]:
        return asyncio.create_task(collect(pipeline, request(rids=[rid], max_new_tokens=480, ignore_eos=True, stream=True)))

    def reason(result: dict[int, list[GenerationChunk]]) -> str:
        end = result[0][-1].finish_reason
        assert end is not None
        return end.type

    tasks = [start("p1"), start("p2"), start("q")]
    await asyncio.sleep(0.02)
    await pipeline.manager.control(AbortRequest(rid="p"))
    assert [reason(await tasks[0]), reason(await tasks[1])] == ["abort", "abort"]
    await pipeline.manager.abort_all()
    assert reason(await tasks[2]) in ("abort", "length")
    with pytest.raises(RequestError, match="abort_all"):
        await pipeline.manager.control(AbortRequest(rid=""))
    assert pipeline.manager.num_live == 0


async def test_abort_while_the_prompt_is_being_tokenized(pipeline: Pipeline) -> None:
    text = "word " * 420  # tokenized in a thread
    task = asyncio.create_task(collect(pipeline, request(text, rids=["early"])))
    await asyncio.sleep(0)
    assert pipeline.manager.num_live == 1
    await pipeline.manager.control(AbortRequest(rid="early"))
    chunk = (await task)[0][-1]
    assert chunk.finish_reason is not None
    assert chunk.finish_reason.type == "abort"
    task = asyncio.create_task(collect(pipeline, request(text, rids=["early"])))
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert pipeline.manager.num_live == 0


async def test_500_requests_with_random_departures_leave_nothing(pipeline: Pipeline) -> None:
    rng = random.Random(11)

    async def one(i: int) -> bool:
        prompt, n = f"prompt {i} " * rng.randint(1, 12), rng.choice([1, 1, 2])
        req = request(prompt, n=n, max_new_tokens=rng.randint(1, 40), stream=True)
        leave_after = rng.choice([0, 1, 3, 1000])
        async with contextlib.aclosing(pipeline.manager.generate(req)) as chunks:
            seen = 0
            async for _ in chunks:
                seen += 1
                if seen > leave_after:
                    return False
        return True

    async def cancelled(i: int) -> bool:
        task = asyncio.create_task(one(i))
        await asyncio.sleep(rng.random() * 0.3)
        task.cancel()
        return await asyncio.gather(task, return_exceptions=True) == [True]

    results = await asyncio.gather(*(one(i) if i % 3 else cancelled(i) for i in range(500)))
    assert sum(results) > 50
    await until(lambda: not pipeline.manager.num_live)
    state = await internal_state(pipeline)
    assert (state["num_running_reqs"], state["num_waiting_reqs"]) == (0, 0)
    assert state["num_leaks_repaired"] == 0


# --- control


async def test_control_requests(pipeline: Pipeline) -> None:
    assert await pipeline.manager.control(FlushCacheReqInput()) == [FlushCacheReqOutput(success=True)]
    assert (await internal_state(pipeline))["context_len"] == 512
    assert await pipeline.manager.health_check(10.0)
    assert pipeline.manager.model_info["vocab_size"] == 2048
    await until(lambda: not pipeline.manager.num_live)


async def test_a_failing_control_request_answers_with_its_error(pipeline: Pipeline) -> None:
    with pytest.raises(RequestError, match=r"server_args\.page_size cannot be changed") as caught:
        await pipeline.manager.control(SetInternalStateReq(server_args={"page_size": 1}))
    assert caught.value.status_code == 400
    assert (await internal_state(pipeline))["page_size"] == 1


async def test_freeze_gc_reaches_every_worker(pipeline: Pipeline) -> None:
    try:
        replies = await pipeline.manager.control(FreezeGCReq())
        assert len(replies) == 2
        assert min(reply.num_frozen for reply in replies) > 100
        assert gc.get_freeze_count() > 100
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_pause_and_continue(pipeline: Pipeline, mode: Any) -> None:
    manager = pipeline.manager
    long = {"max_new_tokens": 200, "ignore_eos": True, "temperature": 0, "stream": True}
    whole = await collect(pipeline, request("pause me", **long))
    stream = manager.generate(request("pause me", **long))
    chunks = [await anext(stream)]
    await manager.control(PauseGenerationReqInput(mode=mode))
    late = asyncio.create_task(collect(pipeline, request("later", max_new_tokens=2)))
    await asyncio.sleep(0.1)
    assert not late.done()
    assert manager.num_live == 2
    assert (await internal_state(pipeline))["is_paused"]
    assert manager.status == "ready"
    assert not manager.is_ready
    assert await manager.health_check(10.0)
    await manager.control(ContinueGenerationReqInput())
    chunks += [chunk async for chunk in stream]
    assert [t for c in chunks for t in c.token_ids] == [t for c in whole[0] for t in c.token_ids]
    assert await late
    assert manager.is_ready


async def test_pause_with_abort_ends_requests_that_are_being_tokenized_too(pipeline: Pipeline) -> None:
    text = "word " * 420  # tokenized in a thread
    running = asyncio.create_task(collect(pipeline, request(max_new_tokens=480, ignore_eos=True)))
    early = asyncio.create_task(collect(pipeline, request(text)))
    await asyncio.sleep(0)
    await pipeline.manager.control(PauseGenerationReqInput())
    for task in (running, early):
        reason = (await task)[0][-1].finish_reason
        assert reason is not None
        assert reason.type == "abort"
    await pipeline.manager.control(ContinueGenerationReqInput())
    await until(lambda: not pipeline.manager.num_live)
