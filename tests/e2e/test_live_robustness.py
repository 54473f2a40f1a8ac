"""A live server under what users do to it: too little memory, aborts, lost clients, crowds, thousands of requests.

Whatever happens, every request is answered once, the pool is whole afterwards and nothing compiles.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, running
from parity import Oracle, asked_of_prompt, prompts_for
from test_live_parity import ask, check

MAX_RUNNING = 16


@pytest.fixture(scope="module")
def server(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, compilation_cache: str
) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("robust") / "server.log"
    options = ["--model-path", str(checkpoint("qwen3")), "--max-running-requests", str(MAX_RUNNING)]
    options += ["--chunked-prefill-size", "64", "--page-size", "16", "--max-total-tokens", "8192"]
    options += ["--decode-row-buckets", "4,16", "--prefill-token-buckets", "64", "--compilation-cache-dir", compilation_cache]
    with running(log, *options) as live:
        yield live


def body(prompt_len: int = 20, new: int = 40, seed: int = 0, **extra: Any) -> dict[str, Any]:
    ids = [3 + (seed * 31 + i * 7) % 290 for i in range(prompt_len)]
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True} | extra.pop("sampling", {})
    return {"input_ids": ids, "sampling_params": sampling, **extra}


def test_retraction_changes_no_token(checkpoint: Callable[[str], Path], tmp_path: Path, compilation_cache: str) -> None:
    """Sixteen requests that grow to 1,300 tokens in a pool of 640, admitted without a reserve: their ends are not known
    (no ignore_eos), and --schedule-conservativeness 0 expects them soon."""
    oracle = Oracle(checkpoint("qwen3"))
    prompts = [prompt[:40] for prompt in prompts_for(oracle.config.vocab_size, 60)][:16]
    options = ["--model-path", str(checkpoint("qwen3")), "--max-running-requests", "16", "--context-length", "128"]
    options += ["--max-total-tokens", "640", "--page-size", "16", "--chunked-prefill-size", "64"]
    options += ["--schedule-conservativeness", "0", "--decode-row-buckets", "16", "--prefill-token-buckets", "64"]
    with running(tmp_path / "server.log", *options, "--compilation-cache-dir", compilation_cache) as live:
        how = asked_of_prompt(1, [])
        # One body: they arrive together. No prompt of these makes the model end by itself.
        replies = ask(live, prompts, 64, how, ignore_eos=False)
        for prompt, reply in zip(prompts, replies, strict=True):
            check(oracle, prompt, 64, how, reply)
        assert live.internal_state()["num_retractions"] > 0
        assert sum(reply["meta_info"]["num_retractions"] for reply in replies) > 0


def test_n_samples_share_their_prompt_and_are_reproducible(server: LiveServer) -> None:
    request = body(prompt_len=70, new=16, seed=5, sampling={"n": 4, "temperature": 1.0, "sampling_seed": 7})
    first = server.generate(**request)
    assert len(first) == 4
    assert len({tuple(reply["output_ids"]) for reply in first}) == 4
    assert sum(reply["meta_info"]["cached_tokens"] for reply in first) >= 3 * 64
    assert [reply["output_ids"] for reply in server.generate(**request)] == [reply["output_ids"] for reply in first]
    greedy = server.generate(**body(prompt_len=70, new=16, seed=5, sampling={"n": 4}))
    assert len({tuple(reply["output_ids"]) for reply in greedy}) == 1


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(server: LiveServer) -> None:
    request = body(new=24, seed=9, sampling={"temperature": 1.0, "top_p": 0.9, "top_k": 40, "sampling_seed": 42})
    alone = server.generate(**request)["output_ids"]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        crowd = [pool.submit(server.generate, **body(new=24, seed=s, sampling={"temperature": 0.8})) for s in range(11)]
        again = pool.submit(server.generate, **request)
        assert again.result()["output_ids"] == alone
        for other in crowd:
            assert len(other.result()["output_ids"]) == 24


def test_two_hundred_streams_at_once_are_each_answered_once(server: LiveServer) -> None:
    async def one(client: httpx.AsyncClient, seed: int) -> list[dict[str, Any]]:
        events, done = [], 0
        request = body(prompt_len=10 + seed % 30, new=12, seed=seed, stream=True)
        async with client.stream("POST", server.url + "/generate", json=request) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    done += 1
                elif line.startswith("data: "):
                    events.append(json.loads(line[6:]))
        assert done == 1
        return events

    async def crowd() -> list[list[dict[str, Any]]]:
        limits = httpx.Limits(max_connections=200, max_keepalive_connections=200)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(200)))

    for seed, events in enumerate(asyncio.run(crowd())):
        finished = [event for event in events if event["meta_info"]["finish_reason"]]
        assert len(finished) == 1
        assert finished[0] is events[-1]
        assert len(events[-1]["output_ids"]) == 12
        if seed % 50 == 0:
            assert events[-1]["output_ids"] == server.generate(**body(10 + seed % 30, 12, seed))["output_ids"]
    server.assert_whole()


def test_abort_reaches_running_and_waiting_requests(server: LiveServer) -> None:
    """More than fit run: some wait. All are aborted by their common prefix, each is answered, the others go on."""
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        doomed = [
            pool.submit(server.post, "/generate", body(new=400, seed=i, rid=f"doomed-{i}")) for i in range(2 * MAX_RUNNING)
        ]
        deadline = time.monotonic() + 20
        while server.internal_state()["num_waiting_reqs"] == 0:
            assert time.monotonic() < deadline, server.internal_state()
            time.sleep(0.02)
        spared = pool.submit(server.generate, **body(new=8, seed=99, rid="spared"))
        assert server.post("/abort_request", {"rid": "doomed"}).status_code == 200
        for future in doomed:
            reply = future.result()
            reason = reply.json()["meta_info"]["finish_reason"] if reply.status_code == 200 else {"type": "abort"}
            assert reason["type"] in ("abort", "length"), reply.text
        assert len(spared.result()["output_ids"]) == 8
    server.assert_whole()


def test_abort_of_a_prompt_that_is_still_prefilled_and_of_nothing(server: LiveServer) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for delay_s in (0.0, 0.01, 0.03):
            long = pool.submit(server.post, "/generate", body(prompt_len=440, new=60, rid="long"))
            time.sleep(delay_s)
            server.post("/abort_request", {"rid": "long"})
            assert long.result().status_code in (200, 499, 500, 503)
            server.wait_idle()
    assert server.post("/abort_request", {"rid": "nobody"}).status_code == 200
    assert server.post("/abort_request", {"abort_all": True}).status_code == 200
    assert len(server.generate(**body(new=4))["output_ids"]) == 4
    server.assert_whole()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(server: LiveServer, stream: bool) -> None:
    before = server.wait_idle()["num_aborted"]
    assert server.post("/slow_down", {"forward_sleep_time": 0.005}).status_code == 200  # else a fast machine is done first
    data = json.dumps(body(new=450, stream=stream, rid=f"left-{stream}")).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        if stream:
            connection.recv(4096)
        else:
            time.sleep(0.05)
    started_s = time.monotonic()
    state = server.wait_idle(20)
    assert server.post("/slow_down", {"forward_sleep_time": None}).status_code == 200
    assert state["num_aborted"] == before + 1, f"ran to its end after {time.monotonic() - started_s:.1f} s: {state}"
    server.assert_whole()


def test_a_full_queue_answers_503(checkpoint: Callable[[str], Path], tmp_path: Path, compilation_cache: str) -> None:
    options = ["--model-path", str(checkpoint("qwen3")), "--max-running-requests", "2", "--max-queued-requests", "2"]
    options += ["--chunked-prefill-size", "64", "--max-total-tokens", "4096", "--compilation-cache-dir", compilation_cache]
    options += ["--decode-row-buckets", "2", "--prefill-token-buckets", "64"]
    with running(tmp_path / "server.log", *options) as live, concurrent.futures.ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda seed: live.post("/generate", body(new=200, seed=seed)), range(12)))
        statuses = sorted(reply.status_code for reply in replies)
        assert set(statuses) == {200, 503}, statuses
        refused = next(reply for reply in replies if reply.status_code == 503)
        assert "queue is full" in refused.json()["error"]["message"]


def test_two_thousand_requests_do_not_grow_any_process(server: LiveServer) -> None:
    def resident_mb() -> dict[str, float]:
        processes = server.workers()
        assert set(processes) == {"scheduler", "detokenizer"}
        sizes = {name: process.memory_info().rss / 2**20 for name, process in processes.items()}
        return sizes | {"main": server.main_process().memory_info().rss / 2**20}

    def some(count: int, seed: int) -> None:
        with httpx.Client(timeout=60) as client:
            for i in range(count):
                reply = client.post(server.url + "/generate", json=body(12 + i % 40, 2, seed * 1000 + i, stream=i % 2 == 0))
                assert reply.status_code == 200

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: some(50, seed), range(8)))
        before = resident_mb()
        list(pool.map(lambda seed: some(250, seed), range(8, 16)))
        after = resident_mb()
    growth = {name: after[name] - before[name] for name in after}
    assert max(growth.values()) < 16, f"MiB per process before {before}, after {after}"
    server.assert_whole()
