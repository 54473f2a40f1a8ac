"""Several detokenizers: a crowd's texts, and how such a server ends."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from pipeline_harness import collect, refused, request, running, until
from scraping import Samples, of, scraped

from jaxserve.messages import DETOKENIZER, WorkerAddress
from jaxserve.scheduler.control.freeze_gc import FreezeGCReq
from jaxserve.scheduler.control.start_profile import ProfileReq
from jaxserve.scheduler.control.stop_profile import StopProfileReq
from jaxserve.server import tokenizer_manager
from jaxserve.server.pipeline import Pipeline
from jaxserve.server.requests import RequestError

NUM_CLIENTS = 64


async def text_and_ids(pipeline: Pipeline, index: int) -> tuple[str, list[int]]:
    req = request([index + 1, 7], n=1 + index % 2, stream=index % 3 > 0, max_new_tokens=20 + index, ignore_eos=True)
    chunks = (await collect(pipeline, req))[index % 2]
    assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].completion_tokens == 20 + index
    return "".join(chunk.text for chunk in chunks), [token for chunk in chunks for token in chunk.token_ids]


def tokens_by_rank(samples: Samples) -> dict[str | None, float]:
    return {dict(labels).get("detokenizer_rank"): count for labels, count in samples["detokenizer_tokens_total"].items()}


async def test_a_crowd_gets_its_texts_from_all_of_them() -> None:
    async with running(dp_size=2, detokenizer_worker_num=3) as pipeline:
        manager = pipeline.manager
        before = await scraped(pipeline)
        for text, ids in await asyncio.gather(*(text_and_ids(pipeline, index) for index in range(NUM_CLIENTS))):
            assert text == manager.decode(ids)
        after = await scraped(pipeline)
        made = {rank: count - tokens_by_rank(before)[rank] for rank, count in tokens_by_rank(after).items()}
        assert set(made) == {None, "1", "2"}
        assert sum(made.values()) == sum((1 + index % 2) * (20 + index) for index in range(NUM_CLIENTS))
        assert min(made.values()) > 0.5 * max(made.values()), made
        assert of(after, "detokenizer_sequences") == 0 == manager.num_live
        for component in ("scheduler", "detokenizer", "detokenizer 1", "detokenizer 2"):
            assert of(after, "snapshot_age_seconds", component=component, dp_rank="0") < 5
        assert all(seconds > 0 for seconds in after["process_cpu_seconds_total"].values())
        assert len(after["process_cpu_seconds_total"]) == 6, "the main process, 2 schedulers, 3 detokenizers"
        assert len(await manager.control(FreezeGCReq())) == 5
        assert await manager.health_check(5.0)
        assert await pipeline.drain(30.0)


async def test_the_warm_up_goes_through_each() -> None:
    async with running(detokenizer_worker_num=3) as pipeline:
        made = (await scraped(pipeline))["detokenizer_tokens_total"]
        assert list(made.values()) == [1, 1, 1]


@pytest.mark.parametrize("victim", [0, 2])
async def test_one_that_is_killed_ends_the_server(victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    worker = WorkerAddress(DETOKENIZER, victim)
    async with running(detokenizer_worker_num=3) as pipeline:
        watch = asyncio.create_task(pipeline.watch())
        tasks = [asyncio.create_task(collect(pipeline, request(max_new_tokens=400, ignore_eos=True))) for _ in range(6)]
        await until(lambda: pipeline.manager.num_live == 6)
        os.kill(pipeline.workers.pids()[worker], signal.SIGKILL)
        assert f"The {worker} process was ended by SIGKILL" in str(await asyncio.wait_for(watch, 10))
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RequestError) and result.status_code == 500
            assert result.message == f"The server's {worker} process ended. The request could not be finished."
        assert (await refused(pipeline, request())).status_code == 503


async def test_they_end_when_a_replica_is_down() -> None:
    async with running(dp_size=2, detokenizer_worker_num=2) as pipeline:
        watch = asyncio.create_task(pipeline.watch())
        os.kill(pipeline.workers.pids()[WorkerAddress("scheduler", 1)], signal.SIGKILL)
        await until(lambda: pipeline.manager.replica_states == ["up", "down"])
        watch.cancel()
        assert await pipeline.drain(30.0)


async def test_a_profile_has_what_each_did(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    merged: list[dict[str, int]] = []

    def note(folder: str, ended_ns: int, processes: dict[str, list[object]]) -> None:
        merged.append({name: len(spans) for name, spans in processes.items()})

    monkeypatch.setattr(tokenizer_manager, "merge", note)
    async with running(detokenizer_worker_num=3) as pipeline:
        await pipeline.manager.control(ProfileReq(output_dir=str(tmp_path)))
        await asyncio.gather(*(collect(pipeline, request([5], stream=True, ignore_eos=True)) for _ in range(6)))
        await pipeline.manager.control(StopProfileReq())
        await until(lambda: merged)
        assert list(merged[0]) == ["detokenizer", "detokenizer 1", "detokenizer 2", "main"]
        assert min(merged[0].values()) > 0
