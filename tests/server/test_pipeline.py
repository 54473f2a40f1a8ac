"""TokenizerManager and Pipeline over the real processes: what comes back of a request, and what is refused."""

from __future__ import annotations

import asyncio
import logging

import pytest
from pipeline_harness import collect, refused, request, running, until

from jaxserve.ipc import Sender
from jaxserve.messages import encode
from jaxserve.server.pipeline import Pipeline
from jaxserve.server.probes import probe_replica
from jaxserve.server.requests import GenerateReqInput, RequestError
from jaxserve.server.timelines import log_times
from jaxserve.timeline import RequestTimeline
from jaxserve.types import SamplingParams


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
    names = ("request_received_ts", "api_server_dispatch_finish_ts", "forward_entry_time", "prefill_finished_time",
             "request_finished_ts", "response_sent_to_client_ts")  # fmt: skip
    moments = [last.meta[name] for name in names]
    assert moments == sorted(moments)
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    assert pipeline.manager.num_live == 0


async def test_observers_get_the_time_line_of_each_sequence(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    manager, seen = pipeline.manager, list[RequestTimeline]()
    observers = [seen.append, lambda timeline: 1 / 0, log_times]
    manager.timelines.observers += observers
    try:
        with caplog.at_level(logging.INFO):
            await collect(pipeline, request(n=2, ignore_eos=True, stream=True, rids=["seen"]))
    finally:
        for observer in observers:
            manager.timelines.observers.remove(observer)
    assert sorted(one.rid for one in seen) == ["seen_0", "seen_1"]
    for one in seen:
        times = one.scheduler
        assert times is not None and times.chunks
        moments = [one.received_s, one.sent_s, times.queue_entry_s, times.first_scheduled_s, times.first_token_s]
        moments += [one.first_text_s, one.answered_s]
        assert moments == sorted(moments) and moments[0] > 0
        assert (one.finish, one.completion_tokens, one.num_samples, one.is_stream) == ("length", 8, 2, True)
    assert seen == (await manager.recent_requests())[-2:]
    assert len([line for line in caplog.messages if "could not be observed" in line]) == 2
    lines = [line for line in caplog.messages if line.startswith("Request times: rid='seen_0'")]
    assert len(lines) == 1 and "queue_time=" in lines[0] and "decode=" in lines[0]


async def test_who_leaves_is_observed_and_probes_are_not(pipeline: Pipeline) -> None:
    manager = pipeline.manager
    before = len(await manager.recent_requests())
    chunks = manager.generate(request(ignore_eos=True, max_new_tokens=100, rids=["left"]))
    await anext(chunks)
    (live,) = [one for one in await manager.recent_requests() if one.rid == "left"]
    assert live.answered_s == 0 and live.completion_tokens > 0 and live.first_text_s > 0
    await chunks.aclose()
    await until(lambda: not manager.num_live)
    (left,) = [one for one in await manager.recent_requests() if one.rid == "left"]
    assert left.finish == "abort" and left.status_code is None and left.answered_s > left.first_text_s
    await probe_replica(manager, 0)
    assert len(await manager.recent_requests()) == before + 1


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


async def test_a_slow_consumer_gets_merged_chunks(pipeline: Pipeline) -> None:
    stream = pipeline.manager.generate(request(max_new_tokens=100, ignore_eos=True, stream=True))
    chunks = [await anext(stream)]
    await until(lambda: not pipeline.manager.num_live)
    chunks += [chunk async for chunk in stream]
    assert len(chunks) <= 3
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert len(ids) == 100
    assert "".join(chunk.text for chunk in chunks) == pipeline.manager.decode(ids)


async def test_chat_template_errors_are_the_users(pipeline: Pipeline) -> None:
    manager = pipeline.manager
    ids = manager.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert manager.decode(ids, False).startswith("<|im_start|>user\nHi")
    with pytest.raises(RequestError, match="chat template cannot render"):
        manager.apply_chat_template([{"content": "no role"}], continue_final_message=True, add_generation_prompt=True)


# --- what is refused, and how


async def test_bad_requests_are_refused_with_a_sentence(pipeline: Pipeline) -> None:
    cases: dict[str, GenerateReqInput] = {
        "The input (512 tokens) is longer than the model's context length (512 tokens)": request([5] * 512),
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
    assert "Exactly one of text, input_ids and input_embeds" in (await refused(pipeline, both)).message
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


# --- what options change


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
