"""Several replicas behind one pipeline, in real processes: who serves what, and what happens when one dies and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import fake_scheduler
import numpy as np
import psutil
import pytest
from fake_contents import weights_of
from fake_runner import FakeRunner, fake_spec
from pipeline_harness import collect, refused, request, running, until
from scraping import of, scraped

from jaxserve.messages import DETOKENIZER, SCHEDULER, WorkerAddress
from jaxserve.scheduler.control.abort_request import AbortRequest
from jaxserve.scheduler.control.block_input import BlockInputReqInput
from jaxserve.scheduler.control.continue_generation import ContinueGenerationReqInput
from jaxserve.scheduler.control.flush_cache import FlushCacheReqInput
from jaxserve.scheduler.control.get_internal_state import GetInternalStateReq
from jaxserve.scheduler.control.open_session import OpenSessionReqInput
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqInput
from jaxserve.scheduler.control.set_internal_state import SetInternalStateReq
from jaxserve.scheduler.control.slow_down import SlowDownReqInput
from jaxserve.scheduler.control.unblock_input import UnblockInputReqInput
from jaxserve.scheduler.control.update_weights_from_disk import UpdateWeightFromDiskReqInput
from jaxserve.server.pipeline import Pipeline
from jaxserve.server.requests import GenerateReqInput, RequestError, SessionParams

SLOW_S = "0.05"
GREEDY: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0}
LONG: dict[str, Any] = {"max_new_tokens": 120, **GREEDY}


def expected(prompt: list[int], weights: int = 0) -> list[int]:
    """Eight greedy tokens."""
    runner = FakeRunner(fake_spec(vocab_size=fake_scheduler.VOCAB_SIZE))
    try:
        return runner.expected_tokens(prompt, 8, stop_ids=(), weights=weights)
    finally:
        runner.close()


def on(rank: int | None, prompt: list[int], **fields: Any) -> GenerateReqInput:
    req = request(prompt, **fields)
    req.data_parallel_rank = rank
    return req


async def states(pipeline: Pipeline) -> list[dict[str, Any]]:
    return [reply.internal_state for reply in await pipeline.manager.control(GetInternalStateReq())]


async def tokens(pipeline: Pipeline, req: GenerateReqInput) -> list[int]:
    return [token for chunk in (await collect(pipeline, req))[0] for token in chunk.token_ids]


def kill(pipeline: Pipeline, rank: int) -> None:
    (worker,) = [worker for worker in pipeline.workers.pids() if worker[:2] == (SCHEDULER, rank)]
    os.kill(pipeline.workers.pids()[worker], signal.SIGKILL)


def live(pipeline: Pipeline) -> list[int]:
    return pipeline.manager.num_live_by_rank


class TestServing:
    @pytest.mark.parametrize("method", ["round_robin", "shortest_queue", "total_tokens", "cache_aware"])
    async def test_all_replicas_serve_and_tokens_are_those_of_one(self, method: str) -> None:
        rng = np.random.default_rng(1)
        prompts = [rng.integers(1, 2000, rng.integers(1, 90)).tolist() for _ in range(64)]
        async with running(dp_size=4, load_balance_method=method) as pipeline:
            outputs = await asyncio.gather(*(tokens(pipeline, request(p, **GREEDY)) for p in prompts))
            reports = await states(pipeline)
            assert live(pipeline) == [0] * 4
        assert outputs == [expected(p) for p in prompts]
        assert [report["dp_rank"] for report in reports] == [0, 1, 2, 3]
        assert all(report["num_leaks_repaired"] == 0 for report in reports)
        served = [report["prefill_tokens"] for report in reports]
        assert min(served) > 0.5 * max(served), served

    async def test_a_request_names_its_replica(self) -> None:
        async with running(dp_size=3) as pipeline:
            prompt = list(range(1, 100))
            for rank in (2, 2, 0, 2):
                chunks = await collect(pipeline, on(rank, prompt))
                assert chunks[0][-1].meta["dp_rank"] == rank
            cached = [report["num_cached_tokens"] for report in await states(pipeline)]
            assert cached[0] >= 99 and cached[1] < 10 and cached[2] >= 99
            for wrong in (3, -1):
                error = await refused(pipeline, on(wrong, prompt))
                assert (error.status_code, error.param) == (400, "data_parallel_rank")
                assert error.message == (
                    f"data_parallel_rank must be in [0, 3), the replicas of this server (--dp-size); got {wrong}."
                )

    async def test_a_batch_is_spread_and_the_samples_of_a_prompt_stay_together(self) -> None:
        async with running(dp_size=2, load_balance_method="round_robin") as pipeline:
            params = request([1], n=3, **GREEDY).sampling_params[0]
            prompts = [[10 * i + 1, 10 * i + 2] for i in range(6)]
            req = GenerateReqInput(input_ids=prompts, sampling_params=[params] * 6)
            chunks = await collect(pipeline, req)
            assert sorted(chunks) == list(range(18))
            for index, given in chunks.items():
                output = [token for chunk in given for token in chunk.token_ids]
                assert output == expected(prompts[index // 3])
            assert [report["num_finished"] for report in await states(pipeline)] == [10, 10], "9, and the warm-up's"

    async def test_who_reads_one_series_of_the_server_sees_all_replicas(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAKE_STEP_S", SLOW_S)
        async with running(dp_size=3, max_running_requests=2) as pipeline:
            tasks = [asyncio.create_task(collect(pipeline, on(rank, [rank + 1], **LONG))) for rank in (1, 1, 1, 2)]
            await until(lambda: live(pipeline) == [0, 3, 1])
            usages = [0.0] * 3
            async with asyncio.timeout(10):
                while not 0 < usages[2] < usages[1]:  # replica 1 runs two requests, of which the second may be late
                    samples = await scraped(pipeline)
                    usages = [of(samples, "token_usage", dp_rank=str(rank)) for rank in range(3)]
            for task in tasks:
                task.cancel()
            await until(lambda: not pipeline.manager.num_live)
            idle = await scraped(pipeline)
        assert [samples[f"server_{name}"] for name in ("running_reqs", "queue_reqs")] == [{(): 3}, {(): 1}]
        assert usages[0] == 0 < usages[2] < usages[1]
        assert of(samples, "server_token_usage") == pytest.approx(sum(usages) / 3)
        assert of(samples, "server_num_pages") == of(samples, "num_pages") > 0
        assert of(idle, "server_running_reqs") == of(idle, "server_token_usage") == 0

    async def test_sessions_stick(self) -> None:
        async with running(dp_size=4, load_balance_method="round_robin") as pipeline:
            (opened,) = await pipeline.manager.control(OpenSessionReqInput(capacity_of_str_len=400, streaming=True))
            cached = []
            for turn in range(4):
                params = SessionParams(id=opened.session_id)
                req = request(list(range(50 * turn + 1, 50 * turn + 51)), session_params=params, **GREEDY)
                cached.append((await collect(pipeline, req))[0][-1].cached_tokens)
                await collect(pipeline, request([7]))  # else the turn would come round anyway
            assert cached[0] == 0
            assert all(later >= 50 * turn for turn, later in enumerate(cached)), cached

    async def test_aborts_and_those_who_leave_reach_their_replica(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAKE_STEP_S", SLOW_S)
        async with running(dp_size=3, load_balance_method="round_robin") as pipeline:
            rids = [f"a{i}" if i % 2 else f"b{i}" for i in range(12)]
            tasks = [asyncio.create_task(collect(pipeline, request([i + 1], rids=[rid], **LONG))) for i, rid in enumerate(rids)]
            await until(lambda: live(pipeline) == [4, 4, 4])
            await pipeline.manager.control(AbortRequest(rid="a"))
            for rid, task in zip(rids, tasks, strict=True):
                if rid[0] == "a":
                    reason = (await task)[0][-1].finish_reason
                    assert reason is not None and reason.type == "abort"
            assert sum(live(pipeline)) == 6
            for task in tasks:
                task.cancel()
            await until(lambda: not pipeline.manager.num_live)
            assert live(pipeline) == [0] * 3
            for report in await states(pipeline):
                assert report["num_running_reqs"] == report["num_waiting_reqs"] == report["num_used_tokens"] == 0

    async def test_control_requests_reach_all(self) -> None:
        async with running(dp_size=2) as pipeline:
            replies = await pipeline.manager.control(FlushCacheReqInput())
            assert [reply.success for reply in replies] == [True, True]
            await pipeline.manager.control(PauseGenerationReqInput(mode="in_place"))
            assert all(report["is_paused"] for report in await states(pipeline))
            assert await pipeline.manager.health_check(5.0)
            await pipeline.manager.control(ContinueGenerationReqInput())
            assert await pipeline.manager.health_check(5.0)
            text, _ = await pipeline.manager.scrape("")
            for rank in range(2):
                assert f'jaxserve:replica_up{{dp_rank="{rank}"'.encode() in text
                assert f'dp_rank="{rank}",engine_type="unified"'.encode() in text

    async def test_blocked_input_is_held_by_all_until_it_is_unblocked(self) -> None:
        async with running(dp_size=2) as pipeline:
            manager = pipeline.manager
            for _ in range(2):
                await manager.control(BlockInputReqInput())
            ranks = (0, 1, 0, 1)
            tasks = [asyncio.create_task(tokens(pipeline, on(rank, [i + 1], **GREEDY))) for i, rank in enumerate(ranks)]
            aborted = asyncio.create_task(collect(pipeline, on(1, [9], rids=["aborted"], **GREEDY)))
            await until(lambda: live(pipeline) == [2, 3])
            assert [(s["is_input_blocked"], s["num_blocked_reqs"]) for s in await states(pipeline)] == [(True, 2), (True, 3)]
            assert await manager.health_check(5.0) and not manager.is_ready
            await manager.control(AbortRequest(rid="aborted"))
            reason = (await asyncio.wait_for(aborted, 10))[0][-1].finish_reason
            assert reason is not None and reason.type == "abort"
            assert not any(task.done() for task in tasks)
            for _ in range(2):
                assert len(await manager.control(UnblockInputReqInput())) == 2
            assert await asyncio.gather(*tasks) == [expected([i + 1]) for i in range(4)]
            assert [(s["is_input_blocked"], s["num_blocked_reqs"]) for s in await states(pipeline)] == [(False, 0)] * 2
            assert manager.is_ready and await manager.health_check(5.0)

    async def test_drain_unblocks_input(self) -> None:
        async with running(dp_size=2) as pipeline:
            await pipeline.manager.control(BlockInputReqInput())
            tasks = [asyncio.create_task(tokens(pipeline, on(rank, [rank + 1], **GREEDY))) for rank in (0, 1)]
            await until(lambda: live(pipeline) == [1, 1])
            assert await pipeline.drain(30.0)
            assert [await task for task in tasks] == [expected([1]), expected([2])]

    async def test_drain_ends_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAKE_STEP_S", SLOW_S)
        async with running(dp_size=3) as pipeline:
            tasks = [asyncio.create_task(collect(pipeline, request([i + 1], **LONG))) for i in range(6)]
            await until(lambda: pipeline.manager.num_live == 6)
            assert await pipeline.drain(30.0)
            assert [(await task)[0][-1].completion_tokens for task in tasks] == [120] * 6


class TestDeath:
    async def test_the_others_serve_on(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setenv("FAKE_STEP_S", SLOW_S)
        async with running(dp_size=3) as pipeline:
            watch = asyncio.create_task(pipeline.watch())
            tasks = [asyncio.create_task(collect(pipeline, on(i % 3, [i + 1], rids=[f"r{i}"], **LONG))) for i in range(9)]
            await until(lambda: live(pipeline) == [3, 3, 3])
            kill(pipeline, 1)
            for i in (1, 4, 7):
                with pytest.raises(RequestError) as caught:
                    await asyncio.wait_for(tasks[i], 10)
                assert caught.value.status_code == 500
                assert caught.value.message == "The server's scheduler 1 process ended. The request could not be finished."
            assert live(pipeline) == [3, 0, 3]
            # Their rids are free at once, and text and tokens of the new ones are their own.
            again = await asyncio.gather(*(tokens(pipeline, request([i + 1], rids=[f"r{i}"], **GREEDY)) for i in (1, 4)))
            assert again == [expected([i + 1]) for i in (1, 4)]
            error = await refused(pipeline, on(1, [5]))
            assert (error.status_code, error.message) == (503, "Replica 1 is not serving at the moment.")
            for i in (0, 2, 3, 5, 6, 8):
                assert (await tasks[i])[0][-1].completion_tokens == 120
            assert pipeline.manager.replica_states == ["up", "down", "up"]
            assert [report["dp_rank"] for report in await states(pipeline)] == [0, 2]
            assert pipeline.manager.status == "ready" and await pipeline.manager.health_check(5.0)
            assert "The scheduler 1 process was ended by SIGKILL" in caplog.text
            assert "2 of 3 replicas serve on" in caplog.text
            assert not watch.done()
            watch.cancel()
            assert await pipeline.drain(10.0)

    async def test_a_session_goes_on_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From the turn before the one that died with its replica; what that had is computed anew."""
        monkeypatch.setenv("FAKE_STEP_S", SLOW_S)
        async with running(dp_size=2) as pipeline:
            watch = asyncio.create_task(pipeline.watch())
            (opened,) = await pipeline.manager.control(OpenSessionReqInput(capacity_of_str_len=400))

            def turn(new: list[int], after: str | None, rid: str, **fields: Any) -> GenerateReqInput:
                params = SessionParams(id=opened.session_id, rid=after)
                return request(new, rids=[rid], session_params=params, **{**GREEDY, **fields})

            first = (await collect(pipeline, turn(list(range(1, 60)), None, "first")))[0]
            home = first[-1].meta["dp_rank"]
            past = [*range(1, 60), *(token for chunk in first for token in chunk.token_ids)]
            dying = asyncio.create_task(collect(pipeline, turn([70], "first", "dying", **LONG)))
            await until(lambda: live(pipeline)[home] == 1)
            kill(pipeline, home)
            with pytest.raises(RequestError, match=r"process ended\. The request could not be finished"):
                await asyncio.wait_for(dying, 10)
            for rid, after, num_cached in (("second", "first", 0), ("third", "second", 59 + 8 + 1 + 7)):
                chunks = (await collect(pipeline, turn([80], after, rid)))[0]
                output = [token for chunk in chunks for token in chunk.token_ids]
                assert output == expected([*past, 80])
                assert (chunks[-1].meta["dp_rank"], chunks[-1].cached_tokens) == (1 - home, num_cached)
                past += [80, *output]
            watch.cancel()

    async def test_the_last_one_ends_the_server(self) -> None:
        async with running(dp_size=2) as pipeline:
            watch = asyncio.create_task(pipeline.watch())
            kill(pipeline, 0)
            await until(lambda: pipeline.manager.replica_states == ["down", "up"])
            kill(pipeline, 1)
            assert "The scheduler 1 process was ended by SIGKILL" in str(await asyncio.wait_for(watch, 10))
            assert pipeline.manager.status == "failed"

    @pytest.mark.parametrize("restart_workers", [False, True])
    async def test_a_detokenizer_is_needed(self, restart_workers: bool) -> None:
        async with running(dp_size=2, restart_workers=restart_workers) as pipeline:
            watch = asyncio.create_task(pipeline.watch())
            os.kill(pipeline.workers.pids()[WorkerAddress(DETOKENIZER)], signal.SIGKILL)
            assert "The detokenizer process" in str(await asyncio.wait_for(watch, 10))

    async def test_a_control_request_is_answered_by_those_that_are_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAKE_STEP_S", SLOW_S)
        async with running(dp_size=2) as pipeline:
            watch = asyncio.create_task(pipeline.watch())
            tasks = [asyncio.create_task(collect(pipeline, on(rank, [3], **LONG))) for rank in (0, 1)]
            await until(lambda: live(pipeline) == [1, 1])
            flush = asyncio.create_task(pipeline.manager.control(FlushCacheReqInput(timeout_s=60)))
            await asyncio.sleep(0.2)
            kill(pipeline, 1)
            await asyncio.gather(*tasks, return_exceptions=True)
            (reply,) = await asyncio.wait_for(flush, 10)
            assert reply.success
            watch.cancel()


class TestRestart:
    async def test_it_comes_back_as_the_others_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with running(dp_size=2, restart_workers=True) as pipeline:
            manager, watch = pipeline.manager, asyncio.create_task(pipeline.watch())
            for path in ("first", "second"):
                await manager.control(UpdateWeightFromDiskReqInput(model_path=path, weight_version=path))
            await manager.control(SetInternalStateReq(server_args={"max_queued_requests": 77}))
            await manager.control(SlowDownReqInput(forward_sleep_time=0.01))
            kill(pipeline, 0)
            await until(lambda: manager.replica_states[0] != "up")
            await manager.control(SlowDownReqInput(forward_sleep_time=0.02))  # while it is away
            assert len(await tokens(pipeline, request([4], **GREEDY))) == 8
            await until(lambda: manager.replica_states == ["up", "up"], 60)
            old, new = sorted(await states(pipeline), key=lambda report: -report["dp_rank"])
            for name in ("max_queued_requests", "forward_sleep_time", "weight_version"):
                assert old.get(name) == new.get(name), name
            assert new["forward_sleep_time"] == 0.02
            for rank in range(2):
                (chunk, *_) = (await collect(pipeline, on(rank, [9, 8, 7], **GREEDY)))[0]
                assert chunk.weight_version == "second"
                second = expected([9, 8, 7], weights_of("second"))
                assert await tokens(pipeline, on(rank, [9, 8, 7], **GREEDY)) == second
            text, _ = await manager.scrape("")
            assert b'jaxserve:replica_restarts_total{dp_rank="0"' in text
            watch.cancel()
            assert await pipeline.drain(10.0)

    async def test_a_paused_server_gets_a_paused_replica(self) -> None:
        async with running(dp_size=2, restart_workers=True) as pipeline:
            watch = asyncio.create_task(pipeline.watch())
            await pipeline.manager.control(PauseGenerationReqInput(mode="in_place"))
            kill(pipeline, 1)
            await until(lambda: pipeline.manager.replica_states[1] != "up")
            await until(lambda: pipeline.manager.replica_states == ["up", "up"], 60)
            assert [report["is_paused"] for report in await states(pipeline)] == [True, True]
            await pipeline.manager.control(ContinueGenerationReqInput())
            assert len(await tokens(pipeline, on(1, [4], **GREEDY))) == 8
            watch.cancel()

    async def test_blocked_input_stays_blocked(self) -> None:
        async with running(dp_size=2, restart_workers=True) as pipeline:
            manager, watch = pipeline.manager, asyncio.create_task(pipeline.watch())
            await manager.control(BlockInputReqInput())
            await manager.control(UnblockInputReqInput())
            await manager.control(BlockInputReqInput())
            kill(pipeline, 1)
            await until(lambda: manager.replica_states[1] != "up")
            await until(lambda: manager.replica_states == ["up", "up"], 60)
            assert [report["is_input_blocked"] for report in await states(pipeline)] == [True, True]
            await manager.control(UnblockInputReqInput())
            kill(pipeline, 0)
            await until(lambda: manager.replica_states[0] != "up")
            await until(lambda: manager.replica_states == ["up", "up"], 60)
            assert [report["is_input_blocked"] for report in await states(pipeline)] == [False, False]
            assert len(await tokens(pipeline, on(0, [4], **GREEDY))) == 8
            watch.cancel()

    async def test_the_only_one_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with running(restart_workers=True) as pipeline:
            watch = asyncio.create_task(pipeline.watch())
            monkeypatch.setenv("FAKE_STEP_S", SLOW_S)
            kill(pipeline, 0)
            await until(lambda: pipeline.manager.status == "restarting")
            error = await refused(pipeline, request([4]))
            assert (error.status_code, error.message) == (503, "The server's replicas are being started again.")
            with pytest.raises(RequestError):
                await pipeline.manager.control(GetInternalStateReq())
            await until(lambda: pipeline.manager.status == "ready", 60)
            assert len(await tokens(pipeline, request([4], **GREEDY))) == 8
            watch.cancel()

    async def test_one_that_dies_again_and_again(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with running(dp_size=2, restart_workers=True) as pipeline:
            watch = asyncio.create_task(pipeline.watch())
            monkeypatch.setenv("FAKE_SCHEDULER", "crash")
            kill(pipeline, 0)
            await until(lambda: caplog.text.count("the device is on fire") >= 2, 60)
            assert "is started again in 1 s" in caplog.text
            assert len(await tokens(pipeline, request([4], **GREEDY))) == 8
            monkeypatch.setenv("FAKE_SCHEDULER", "")
            await until(lambda: pipeline.manager.replica_states == ["up", "up"], 60)
            watch.cancel()

    async def test_a_drain_waits_for_none_that_is_on_its_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with running(dp_size=2, restart_workers=True) as pipeline:
            watch = asyncio.create_task(pipeline.watch())
            monkeypatch.setenv("FAKE_SCHEDULER", "hang")
            kill(pipeline, 0)
            await until(lambda: pipeline.manager.replica_states[0] == "joining", 30)
            watch.cancel()
            assert await asyncio.wait_for(pipeline.drain(5.0), 20)
            assert not [pid for pid in pipeline.workers.pids().values() if psutil.pid_exists(pid)]
