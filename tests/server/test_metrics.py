"""/metrics: what is counted, that it is bounded, and that a scrape does not wait for a busy worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

import httpx
import pytest
from fake_service import FakeService, counting
from http_harness import app_client
from pipeline_harness import collect, request, running, until
from scraping import of, parsed, scraped

from jaxserve.config import ServerArgs
from jaxserve.scheduler.control.get_internal_state import GetInternalStateReq
from jaxserve.server.http.app import create_app
from jaxserve.server.metrics import SCRAPE_WAIT_S, CustomLabels, TokenGaps
from jaxserve.server.pipeline import Pipeline
from jaxserve.timeline import RequestTimeline, RequestTimes


async def test_requests_are_counted_in_every_process(pipeline: Pipeline) -> None:
    before = await scraped(pipeline)
    await collect(pipeline, request([7] * 30, n=2, stream=True, ignore_eos=True, max_new_tokens=20))
    await collect(pipeline, request([7] * 30, ignore_eos=True, max_new_tokens=5))
    after = await scraped(pipeline)

    def gained(name: str, **labels: str) -> float:
        return of(after, name, **labels) - of(before, name, **labels)

    assert gained("num_requests_total") == 3 and gained("num_aborted_requests_total") == 0
    assert gained("prompt_tokens_total") == 90 and gained("generation_tokens_total") == 45
    assert gained("time_to_first_token_seconds_count") == gained("e2e_request_latency_seconds_count") == 3
    # Of streams, each token but the first; a reply that comes whole brings its tokens together.
    assert 2 * 19 <= gained("inter_token_latency_seconds_count") <= 2 * 19 + 4
    for stage in ("tokenize", "dispatch", "queue", "prefill", "decode", "return"):
        assert gained("per_stage_req_latency_seconds_count", stage=stage) == 3
    modes = {mode: gained("realtime_tokens_total", mode=mode) for mode in ("prefill_compute", "prefill_cache", "decode")}
    assert modes["prefill_compute"] + modes["prefill_cache"] == 90 and modes["decode"] >= 45
    assert modes["prefill_cache"] > 0
    assert gained("num_steps_total", kind="decode") >= 19 and gained("num_steps_total", kind="prefill") >= 2
    steps = gained("step_seconds_count", kind="decode") + gained("step_seconds_count", kind="prefill")
    assert steps == gained("num_steps_total")
    assert gained("detokenizer_tokens_total") == 45 and gained("detokenizer_seconds_total") > 0
    assert list(after["detokenizer_tokens_total"]) == [(("dp_rank", "0"),)]
    stages = {
        stage: gained("scheduler_stage_seconds_total", stage=stage) for stage in ("schedule", "launch", "process", "idle")
    }
    assert all(seconds > 0 for seconds in stages.values()), stages
    cpu = {component: of(after, "process_cpu_seconds_total", component=component) for component in ("tokenizer", "scheduler")}
    assert all(seconds > 0 for seconds in cpu.values()) and of(after, "process_cpu_seconds_total", component="detokenizer") > 0
    state = (await pipeline.manager.control(GetInternalStateReq()))[0].internal_state
    assert of(after, "max_total_num_tokens") == state["max_total_num_tokens"]
    assert of(after, "kv_evictable_tokens") == state["kv_groups"][0]["evictable_tokens"] > 0


async def test_a_scrape_does_not_wait_for_a_worker(pipeline: Pipeline) -> None:
    await scraped(pipeline)
    (scheduler,) = [pid for name, pid in pipeline.workers.pids().items() if name.kind == "scheduler"]
    os.kill(scheduler, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        many = await asyncio.gather(*[scraped(pipeline) for _ in range(5)])
        assert time.monotonic() - began_s < SCRAPE_WAIT_S + 1
        ages = [of(one, "snapshot_age_seconds", component="scheduler") for one in many]
        assert min(ages) > SCRAPE_WAIT_S / 2 and of(many[0], "max_total_num_tokens") > 0
        assert not await pipeline.manager.health_check(0.5), "numbers of the detokenizer are no sign of life"
    finally:
        os.kill(scheduler, signal.SIGCONT)
    await until(lambda: not pipeline.manager.num_live)
    assert of(await scraped(pipeline), "snapshot_age_seconds", component="scheduler") < 0.5


async def test_a_server_whose_worker_is_gone_shows_what_was(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as pipeline:
        await scraped(pipeline)
        watch = asyncio.create_task(pipeline.watch())
        os.kill(next(iter(pipeline.workers.pids().values())), signal.SIGKILL)
        await watch
        after = await scraped(pipeline)
        assert of(after, "server_ready") == 0 and of(after, "max_total_num_tokens") > 0


async def test_labels_of_clients_are_bounded() -> None:
    service = FakeService()
    service.metrics = counting(extra_metric_labels='{"dc": "a"}', tokenizer_metrics_allowed_custom_labels=("team", "app"))
    labels_of = service.metrics.custom_labels.of
    async with app_client(service) as client:
        for i in range(300):
            service.metrics.observe(RequestTimeline(rid="r", received_s=1, answered_s=2, labels=labels_of({"team": str(i)})))
            await client.request("POST" if i % 2 else f"BREW{i}", f"/made/up/{i}")
        reply = await client.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain")
        samples = parsed(reply.text)
    teams = {dict(key)["team"] for key in samples["num_requests_total"]}
    assert len(teams) <= 129 and "other" in teams and sum(samples["num_requests_total"].values()) == 300
    assert all(dict(key)["dc"] == "a" for series in samples.values() for key in series)
    endpoints = {(dict(key)["endpoint"], dict(key)["method"]) for key in samples["http_requests_total"]}
    assert endpoints == {("unknown", "POST"), ("unknown", "unknown"), ("/metrics", "GET")}
    assert of(samples, "http_responses_total", endpoint="unknown", method="POST", status_code="404") == 150


def test_custom_labels_are_texts_that_were_allowed() -> None:
    custom = CustomLabels(("team", "app"))
    assert custom.of({"team": "a", "other": "b", "app": 3}) == ("a", "")
    assert custom.of_header('{"team": "a\\ud800' + "x" * 1000 + '"}')[0].startswith("a?x")
    assert len(custom.of_header(json.dumps({"team": "x" * 1000}))[0]) == 128
    for wrong in ("", "{", "[]", "3", "null", "[" * 100_000):
        assert custom.of_header(wrong) == ("", "")
    assert CustomLabels(()).of({"team": "a"}) == ()


async def test_custom_labels_come_by_header_and_body() -> None:
    async with running(tokenizer_metrics_allowed_custom_labels=("team",)) as pipeline:
        app = create_app(pipeline.manager, pipeline.args)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            native = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
            chat = {"model": pipeline.args.model_path, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            header = {"x-custom-labels": '{"team": "header"}'}
            for path, body in (("/generate", native), ("/v1/chat/completions", chat)):
                for headers in ({}, header):
                    for extra in ({}, {"custom_labels": {"team": "body"}}):
                        reply = await client.post(path, json={**body, **extra}, headers=headers)
                        assert reply.status_code == 200, reply.text
            streamed = await client.post("/generate", json={**native, "stream": True}, headers=header)
            assert streamed.status_code == 200
            samples = parsed((await client.get("/metrics")).text)
    counts = {team: of(samples, "num_requests_total", team=team) for team in ("", "header", "body")}
    assert counts == {"": 2, "header": 3, "body": 4}
    assert of(samples, "http_responses_total", endpoint="/v1/chat/completions", status_code="200") == 4


async def test_metrics_can_be_off() -> None:
    service = FakeService()
    service.metrics = None
    async with app_client(service) as client:
        reply = await client.get("/metrics")
    assert reply.status_code == 404 and "--no-enable-metrics" in reply.text


def test_latencies_are_of_requests_that_were_served() -> None:
    metrics = counting()
    times = RequestTimes(queue_entry_s=10, first_scheduled_s=11, first_token_s=12, finished_s=20)
    fields: dict[str, Any] = {"rid": "r", "received_s": 10.0, "sent_s": 10.0, "answered_s": 21.0, "scheduler": times}
    metrics.observe(
        RequestTimeline(**fields, first_text_s=13.0, completion_tokens=9, prompt_tokens=4, finish="stop", is_stream=True)
    )
    metrics.observe(RequestTimeline(**fields, first_text_s=21.0, completion_tokens=9, prompt_tokens=4, finish="stop"))
    metrics.observe(RequestTimeline(**fields, finish="abort", status_code=503))
    refused = RequestTimes(queue_entry_s=10, finished_s=10)
    metrics.observe(RequestTimeline(**fields | {"scheduler": refused}, finish="abort", status_code=400, prompt_tokens=7))
    of_ = metrics.registry
    assert of_.histogram("e2e_request_latency_seconds").count() == 2
    assert of_.histogram("time_to_first_token_seconds").value() == 3 + 2
    assert of_.histogram("request_time_per_output_token_seconds").value() == 2 * 1.0
    assert of_.counter("prompt_tokens_total").value() == 8
    failed = of_.counter("num_failed_requests_total")
    assert (failed.value(("503",)), failed.value(("400",))) == (1, 1)


def test_gaps_are_taken_in_heaps() -> None:
    heaps: list[tuple[int, tuple[str, ...]]] = []
    gaps = TokenGaps(lambda seconds, times, labels: heaps.append((int(times.sum()), labels)))
    for _ in range(1500):
        gaps.buffer(("a",)).add(0.1, 2)
    gaps.buffer(("b",)).add(0.1, 1)
    gaps.settle()
    gaps.settle(1)
    assert heaps == [(3000, ("a",)), (1, ("b",))]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bucket_time_to_first_token": (2.0, 1.0)}, "increasing"),
        ({"bucket_inter_token_latency": ()}, "increasing"),
        ({"extra_metric_labels": '{"le": "x"}'}, "le"),
        ({"extra_metric_labels": '{"a": 1}'}, "texts"),
        ({"tokenizer_metrics_allowed_custom_labels": ("a-b",)}, "a-b"),
        ({"tokenizer_metrics_allowed_custom_labels": ("a",), "extra_metric_labels": '{"a": "b"}'}, "must not name"),
    ],
)
def test_wrong_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServerArgs(model_path="m", **options)
