"""Servers of ours behind the router processes that people use: SGLang's and vLLM's (docs/routers.md).

The servers have a fake device: HTTP, scheduler, prefix cache and KV events are real. Each has two replicas.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live_server import free_ports
from server_process import Server, serving

NUM_RANKS = 2
STEP_S = 0.002
SGLANG, VLLM = "sglang-router", "vllm-router"


class Worker:
    """A server, and where its replicas tell what they have cached."""

    def __init__(self, server: Server, events_port: int) -> None:
        self.url = server.url
        self.server = server
        self.event_sources = ",".join(f"tcp://127.0.0.1:{events_port + rank}" for rank in range(NUM_RANKS))

    def num_requests(self) -> list[int]:
        """Of each replica, so far."""
        return [state["num_requests"] for state in self.states()]

    def states(self) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = httpx.get(f"{self.url}/server_info").json()["internal_states"]
        return states

    def num_live(self) -> int:
        return sum(load["num_live_sequences"] for load in httpx.get(f"{self.url}/v1/loads").json()["loads"])


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(2):
            port = free_ports(NUM_RANKS)
            config = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}", "bind": True, "encoding": "vllm"}
            options: dict[str, Any] = {
                "dp_size": NUM_RANKS, "served_model_name": "demo", "kv_events_config": json.dumps(config),
            }  # fmt: skip
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rt-")))  # sockets need short paths
            started.append(Worker(stack.enter_context(serving(folder, step_s=STEP_S, **options)), port))
        for worker in started:
            worker.server.wait_for("/ready", 200)
        yield started
        for worker in started:
            worker.server.stop()


@contextlib.contextmanager
def routing(program: str, workers: list[Worker], log: Path, *options: str) -> Iterator[str]:
    """The URL of a router before these workers, which it has found ready."""
    pytest.importorskip(program.replace("-", "_"), reason=f"{program} is not installed")
    port = free_ports(2)
    command = [str(Path(sys.executable).with_name(program)), *(["launch"] if program == SGLANG else [])]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--prometheus-port",
        str(port + 1),
        "--prometheus-host",
        "127.0.0.1",
    ]
    with log.open("wb") as terminal:
        router = subprocess.Popen(
            [*command, "--worker-urls", *(worker.url for worker in workers), *options],
            stdout=terminal,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url, router, log, len(workers))
        yield url
    finally:
        router.kill()
        router.wait()


def _wait_until_ready(url: str, router: subprocess.Popen[bytes], log: Path, num_workers: int) -> None:
    deadline_s = time.monotonic() + 60
    while True:
        assert router.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            found = httpx.get(f"{url}/workers").json()["workers"]
            if len({worker["url"].split("@")[0] for worker in found if worker["is_healthy"]}) == num_workers:
                return
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.1)


def until(true: Any, words: str, timeout_s: float = 30) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s, words
        time.sleep(0.02)


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def ask_on_every_route(url: str) -> None:
    """Whole replies and streams, by the `openai` package where it has the route."""
    client, messages = client_of(url), [{"role": "user", "content": "hi"}]
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    assert httpx.post(f"{url}/generate", json=body).json()["meta_info"]["completion_tokens"] == 4
    streamed = httpx.post(f"{url}/generate", json={**body, "stream": True}).text
    assert streamed.count("data: ") >= 2 and "data: [DONE]" in streamed
    common: dict[str, Any] = {"model": "demo", "max_tokens": 4, "extra_body": {"ignore_eos": True}}
    usage = {"stream_options": {"include_usage": True}}
    assert client.chat.completions.create(messages=messages, **common).usage.completion_tokens == 4
    events = list(client.chat.completions.create(messages=messages, stream=True, **usage, **common))
    assert events[-1].usage.completion_tokens == 4
    assert client.completions.create(prompt="hi", **common).usage.completion_tokens == 4
    assert list(client.completions.create(prompt="hi", stream=True, **usage, **common))[-1].usage.completion_tokens == 4
    reply = client.responses.create(model="demo", input="hi", max_output_tokens=4)
    assert 1 <= reply.usage.output_tokens <= 4


def leave_a_stream(url: str, workers: list[Worker]) -> None:
    """What nobody reads any more is not generated any more."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 450, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}) as reply:
        lines = reply.iter_lines()
        for _ in range(4):
            next(lines)
        assert sum(worker.num_live() for worker in workers) == 1
    until(lambda: not any(worker.num_live() for worker in workers), "a request outlives its client", timeout_s=10)
    aborted = [state["num_aborted"] for worker in workers for state in worker.states()]
    assert sum(aborted) >= 1


def test_sglangs_router_knows_the_replicas_and_uses_all(workers: list[Worker], tmp_path: Path) -> None:
    before = [worker.num_requests() for worker in workers]
    with routing(SGLANG, workers, tmp_path / "log", "--policy", "round_robin", "--dp-aware") as url:
        found = httpx.get(f"{url}/workers").json()["workers"]
        assert {worker["url"] for worker in found} == {f"{worker.url}@{rank}" for worker in workers for rank in (0, 1)}
        assert {(worker["model_id"], worker["metadata"]["dp_size"]) for worker in found} == {("demo", "2")}
        assert [model.id for model in client_of(url).models.list()] == ["demo"]
        ask_on_every_route(url)
        leave_a_stream(url, workers)
    after = [worker.num_requests() for worker in workers]
    assert all(y > x for xs, ys in zip(before, after, strict=True) for x, y in zip(xs, ys, strict=True))


def test_sglangs_router_reads_the_load(workers: list[Worker], tmp_path: Path) -> None:
    with routing(SGLANG, workers, tmp_path / "log", "--policy", "power_of_two") as url:
        loads = httpx.get(f"{url}/get_loads").json()["workers"]
        assert {load["worker"]: load["load"] for load in loads} == {worker.url: 0 for worker in workers}  # -1: it has none
        ask_on_every_route(url)


def test_vllms_router_follows_the_prefix_cache(workers: list[Worker], tmp_path: Path) -> None:
    """It indexes our KV events, and has prompts rendered by the servers to look them up."""
    block_size = httpx.get(f"{workers[0].url}/server_info").json()["kv_events"]["block_size"]
    options = ["--policy", "kv_aware", "--kv-event-model", "demo", "--kv-event-block-size", str(block_size)]
    options += ["--intra-node-data-parallel-size", str(NUM_RANKS), "--api-key", "none"]
    for worker in workers:
        options += ["--kv-event-source", f"{worker.url}={worker.event_sources}"]
    log = tmp_path / "log"
    with routing(VLLM, workers, log, *options) as url:
        client, rng = client_of(url), random.Random(0)
        places = [(worker, rank) for worker in workers for rank in range(NUM_RANKS)] * 2
        prompts = [[rng.randrange(100, 2000) for _ in range(96)] for _ in places]
        for (worker, rank), prompt in zip(places, prompts, strict=True):
            warm(worker, rank, prompt)
        warm(workers[0], 0, prompts[0][:64], cache_salt="tenant")
        time.sleep(0.5)  # for the events
        for (worker, rank), prompt in zip(places, prompts, strict=True):
            before = worker.num_requests()[rank]
            client.completions.create(model="demo", prompt=[*prompt, 7, 8, 9], max_tokens=1)
            assert worker.num_requests()[rank] == before + 1, log.read_text()
        ask_on_every_route(url)
        leave_a_stream(url, workers)
    assert "decode" not in log.read_text(), "events that it could not read"


def warm(worker: Worker, rank: int, prompt: list[int], **fields: Any) -> None:
    body = {"input_ids": prompt, "routed_dp_rank": rank, "sampling_params": {"max_new_tokens": 1}, **fields}
    assert httpx.post(f"{worker.url}/generate", json=body).status_code == 200
