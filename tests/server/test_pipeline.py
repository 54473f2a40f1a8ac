"""TokenizerManager and Pipeline over the real processes: a FakeRunner behind the real scheduler, the real detokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import fake_scheduler
import psutil
import pytest

from jaxserve.config import ServerArgs
from jaxserve.demo import demo_model_path
from jaxserve.ipc import Sender
from jaxserve.messages import DETOKENIZER, WorkerAddress, encode
from jaxserve.scheduler.control.abort_request import AbortRequest
from jaxserve.scheduler.control.continue_generation import ContinueGenerationReqInput
from jaxserve.scheduler.control.flush_cache import FlushCacheReqInput, FlushCacheReqOutput
from jaxserve.scheduler.control.freeze_gc import FreezeGCReq
from jaxserve.scheduler.control.get_internal_state import GetInternalStateReq
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqInput
from jaxserve.scheduler.control.set_internal_state import SetInternalStateReq
from jaxserve.server.pipeline import Pipeline
from jaxserve.server.requests import GenerateReqInput, GenerationChunk, RequestError
from jaxserve.server.workers import WorkerDiedError
from jaxserve.types import SamplingParams


@contextlib.asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Pipeline]:
    """A ready pipeline; at the end nothing of it may be left."""
    pipeline = Pipeline(ServerArgs(**{"model_path": demo_model_path(), **options}), fake_scheduler.commands())
    try:
        await pipeline.start()
        await asyncio.wait_for(pipeline.wait_ready(), 120)
        yield pipeline
    finally:
        pids = pipeline.workers.pids()
        folder = pipeline._paths.folder if pipeline._paths else None
        await pipeline.close()
        assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)], "a worker is left"
        assert folder is None or not folder.exists()


@pytest.fixture(scope="module")
async def pipeline() -> AsyncIterator[Pipeline]:
    """Its steps take 2 ms, so that a request of 480 tokens can be aborted before its end on a busy machine too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_STEP_S", "0.002")
        async with running() as ready:
            yield ready


def request(prompt: str | list[int] = "Hello there", n: int = 1, **fields: Any) -> GenerateReqInput:
    own = {"stream", "rids", "return_logprob", "top_logprobs_num", "priority", "extra_key", "cache_salt"}
    req_fields = {name: fields.pop(name) for name in list(fields) if name in own}
    params = SamplingParams(**{"max_new_tokens": 8, "n": n, **fields})
    text = isinstance(prompt, str)
    return GenerateReqInput(
        prompts=[prompt] if isinstance(prompt, str) else None,
        input_ids=None if text else [prompt],  # type: ignore[list-item]
        sampling_params=[params],
        **req_fields,
    )


async def collect(pipeline: Pipeline, req: GenerateReqInput) -> dict[int, list[GenerationChunk]]:
    chunks: dict[int, list[GenerationChunk]] = {}
    async for chunk in pipeline.manager.generate(req):
        chunks.setdefault(chunk.index, []).append(chunk)
    return chunks


async def internal_state(pipeline: Pipeline) -> dict[str, Any]:
    (reply,) = await pipeline.manager.control(GetInternalStateReq())
    return reply.internal_state


async def until(condition: Any, timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(0.01)


async def refused(pipeline: Pipeline, req: GenerateReqInput) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await collect(pipeline, req)
    return caught.value


# --- generating


async def test_a_request_comes_back_whole(pipeline: Pipeline) -> None:
    chunks = (await collect(pipeline, request(stream=True, ignore_eos=True)))[0]
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert len(ids) == 8
    assert "".join(chunk.text for chunk in chunks) == pipeline.manager.decode(ids)
    last = chunks[-1]
    assert last.finish_reason is not None
    assert last.finish_reason.to_dict() == {"type": "length", "length": 8}
    assert last.completion_tokens == 8
    assert last.prompt_tokens == len(pipeline.manager.encode("Hello there"))
    assert {"e2e_latency", "queue_time", "num_retractions", "first_token_latency"} <= set(last.meta)
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    assert pipeline.manager.num_live == 0


async def test_text_and_its_ids_are_the_same_request(pipeline: Pipeline) -> None:
    by_text = await collect(pipeline, request("The same", temperature=0))
    by_ids = await collect(pipeline, request(pipeline.manager.encode("The same"), temperature=0))
    assert [c.token_ids for c in by_text[0]] == [c.token_ids for c in by_ids[0]]


async def test_samples_have_their_own_rids_and_seeds(pipeline: Pipeline) -> None:
    chunks = await collect(pipeline, request(n=3, sampling_seed=7, rids=["abc"]))
    assert {index: c[0].rid for index, c in chunks.items()} == {0: "abc_0", 1: "abc_1", 2: "abc_2"}
    texts = ["".join(c.text for c in chunks[i]) for i in range(3)]
    assert len(set(texts)) == 3
    alone = await collect(pipeline, request(sampling_seed=8))
    assert "".join(c.text for c in alone[0]) == texts[1], "sample j has the seed plus j"


async def test_64_samples_of_a_long_prompt_cross_the_border_once(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    send = Sender.send
    monkeypatch.setattr(Sender, "send", lambda sender, message: (sizes.append(len(encode(message))), send(sender, message)))
    chunks = await collect(pipeline, request([5] * 400, n=64, max_new_tokens=3, sampling_seed=1, rids=["many"]))
    assert len(chunks) == 64
    assert len({tuple(token for chunk in one for token in chunk.token_ids) for one in chunks.values()}) == 64
    assert len(sizes) == 1
    assert sizes[0] < 400 * 4 + 64 * 16 + 200


async def test_a_batch_is_numbered_prompt_by_prompt(pipeline: Pipeline) -> None:
    params = SamplingParams(max_new_tokens=2, n=2)
    req = GenerateReqInput(prompts=["a", "b b b"], sampling_params=[params, params])
    chunks = await collect(pipeline, req)
    assert sorted(chunks) == [0, 1, 2, 3]
    lens = [chunks[i][-1].prompt_tokens for i in range(4)]
    assert lens[0] == lens[1] != lens[2] == lens[3]


async def test_long_prompts_are_tokenized_off_the_loop(pipeline: Pipeline) -> None:
    text = "word " * 420
    chunks = await collect(pipeline, request(text, max_new_tokens=1))
    assert chunks[0][-1].prompt_tokens == len(pipeline.manager.encode(text))


async def test_stop_strings_are_cut(pipeline: Pipeline) -> None:
    whole = "".join(c.text for c in (await collect(pipeline, request("stop me", temperature=0)))[0])
    stop = whole[len(whole) // 2 :][:3]
    chunks = (await collect(pipeline, request("stop me", temperature=0, stop=[stop], stream=True)))[0]
    assert "".join(c.text for c in chunks) == whole[: whole.find(stop)]
    reason = chunks[-1].finish_reason
    assert reason is not None
    assert reason.matched == stop


async def test_logprobs_belong_to_their_tokens(pipeline: Pipeline) -> None:
    chunks = (await collect(pipeline, request(return_logprob=True, top_logprobs_num=2, ignore_eos=True)))[0]
    pairs = [(logprob.token_id, token) for c in chunks for logprob, token in zip(c.logprobs, c.token_ids, strict=True)]
    assert len(pairs) == 8
    assert all(a == b for a, b in pairs)
    assert all(len(logprob.top) == 2 for c in chunks for logprob in c.logprobs)


# --- what is refused, and how


async def test_bad_requests_are_refused_with_a_sentence(pipeline: Pipeline) -> None:
    cases: dict[str, GenerateReqInput] = {
        "context length is 512": request([5] * 512),
        "together 515": request([5] * 505, max_new_tokens=10),
        "input_ids must lie in [0, 2048), got 2048": request([2048]),
        "input_ids must lie in [0, 2048), got -1": request([3, -1]),
        "got 100000000000000000000": request([10**20]),
        "The prompt is empty": request([]),
        "temperature must be": request(temperature=-1.0),
        "stop_token_ids must lie in": request(stop_token_ids=[2048]),
        "top_logprobs_num must be in [0, 4], got 5": request(return_logprob=True, top_logprobs_num=5),
        "rid must not be an empty string": request(rids=[""]),
        "rid must have one entry per prompt": request(rids=["a", "b"]),
        "text holds a lone surrogate, U+D800": request("a\ud800"),
        "stop holds a lone surrogate": request(stop=["\udfff"]),
        "priority must lie within": request(priority=1 << 40),
        "n must be at most": request(n=5000),
        "stop_regex": request(stop_regex=["("]),
    }
    for sentence, req in cases.items():
        error = await refused(pipeline, req)
        assert sentence in error.message
        assert error.status_code == 400
    both = GenerateReqInput(prompts=["a"], input_ids=[[1]], sampling_params=[SamplingParams()])
    assert "Exactly one of text and input_ids" in (await refused(pipeline, both)).message
    assert pipeline.manager.num_live == 0


async def test_numbers_without_a_limit_do_no_harm(pipeline: Pipeline) -> None:
    chunks = await collect(pipeline, request(top_k=10**30, stream_interval=10**30, sampling_seed=2**63 - 1, n=2))
    assert len(chunks) == 2


async def test_no_limit_on_new_tokens_means_the_context(pipeline: Pipeline) -> None:
    chunks = await collect(pipeline, request([5] * 500, max_new_tokens=None, ignore_eos=True))
    assert chunks[0][-1].completion_tokens == 12


async def test_a_live_rid_is_refused_until_its_end(pipeline: Pipeline) -> None:
    first = pipeline.manager.generate(request(rids=["dup"], max_new_tokens=400, ignore_eos=True, stream=True))
    await anext(first)
    error = await refused(pipeline, request(rids=["dup"]))
    assert "'dup' belongs to a request that is still running" in error.message
    await first.aclose()
    await until(lambda: not pipeline.manager.num_live)
    assert await collect(pipeline, request(rids=["dup"]))
    twice = GenerateReqInput(prompts=["a", "b"], sampling_params=[SamplingParams()] * 2, rids=["x", "x"])
    assert "must differ" in (await refused(pipeline, twice)).message


# --- aborting


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


async def test_a_slow_consumer_gets_merged_chunks(pipeline: Pipeline) -> None:
    stream = pipeline.manager.generate(request(max_new_tokens=100, ignore_eos=True, stream=True))
    chunks = [await anext(stream)]
    await until(lambda: not pipeline.manager.num_live)
    chunks += [chunk async for chunk in stream]
    assert len(chunks) <= 3
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert len(ids) == 100
    assert "".join(chunk.text for chunk in chunks) == pipeline.manager.decode(ids)


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


async def test_chat_template_errors_are_the_users(pipeline: Pipeline) -> None:
    manager = pipeline.manager
    ids = manager.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert manager.decode(ids, False).startswith("<|im_start|>user\nHi")
    with pytest.raises(RequestError, match="chat template cannot render"):
        manager.apply_chat_template([{"content": "no role"}], continue_final_message=True, add_generation_prompt=True)


async def test_the_main_process_and_the_detokenizer_know_no_jax(pipeline: Pipeline) -> None:
    code = (
        "import sys, jaxserve.server.detokenizer, jaxserve.server.launch\n"
        "import jaxserve.server.http.uvicorn_server, jaxserve.server.engine\n"
        "bad = {'jax', 'jaxlib', 'flax', 'torch'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0
    maps = await asyncio.to_thread(psutil.Process(pipeline.workers.pids()[WorkerAddress(DETOKENIZER)]).memory_maps)
    assert not [m.path for m in maps if "jaxlib" in m.path or "libtorch" in m.path]


# --- the end


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


async def test_drain_aborts_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    async with running() as pipeline:
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
            assert "SIGKILL" in result.message
        error = await refused(pipeline, request())
        assert error.status_code == 503
        assert "The server has failed" in error.message


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


async def test_a_full_queue_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.02")
    async with running(max_queued_requests=2, max_running_requests=1) as pipeline:
        tasks = [asyncio.create_task(collect(pipeline, request(max_new_tokens=30))) for _ in range(8)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [result for result in results if isinstance(result, RequestError)]
        assert errors
        assert {(error.status_code, error.err_type) for error in errors} == {(503, "ServiceUnavailableError")}
        assert len(errors) < 8
        assert pipeline.manager.num_live == 0


async def test_nobody_may_wait() -> None:
    async with running(max_queued_requests=0) as pipeline:  # the first request needs no place in the queue
        chunks = await collect(pipeline, request(max_new_tokens=3))
        assert chunks[0][-1].completion_tokens == 3


async def test_auto_truncate_shortens_instead_of_refusing() -> None:
    async with running(allow_auto_truncate=True) as pipeline:
        chunks = await collect(pipeline, request([5] * 600, max_new_tokens=50))
        assert chunks[0][-1].prompt_tokens == 511
        assert chunks[0][-1].completion_tokens == 1
