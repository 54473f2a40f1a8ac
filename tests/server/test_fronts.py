"""Servers with front processes, around the fake scheduler: whoever answers, the answer is the server's."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_scheduler
import httpx
import openai
import psutil
import pytest
from fake_runner import FakeRunner, fake_spec
from server_process import Server, serving

from jaxserve import Engine
from jaxserve.demo import demo_model_path

NUM_FRONTS = 3
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="fronts-") as folder:
        options: dict[str, Any] = {
            "tokenizer_worker_num": NUM_FRONTS,
            "detokenizer_worker_num": 2,
            "log_level_http": "info",
            "served_model_name": "demo",
        }
        with serving(Path(folder), step_s=0.01, **options) as started:
            started.wait_for("/ready", 200)
            yield started
            started.stop()


@contextlib.contextmanager
def connections(server: Server, count: int = NUM_FRONTS) -> Iterator[list[httpx.Client]]:
    """So many, each to the next front in turn as long as nobody else comes."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=server.url, timeout=60)) for _ in range(count)]
        for client in clients:
            client.get("/health")
        yield clients


def expected(prompt: list[int], count: int) -> list[int]:
    runner = FakeRunner(fake_spec(vocab_size=fake_scheduler.VOCAB_SIZE))
    try:
        return runner.expected_tokens(prompt, count, stop_ids=())
    finally:
        runner.close()


def body(prompt: list[int], count: int, **fields: Any) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {"max_new_tokens": count, **GREEDY}, **fields}


def generate(client: httpx.Client, prompt: list[int], count: int = 8, **fields: Any) -> httpx.Response:
    return client.post("/generate", json=body(prompt, count, **fields))


def events(
    client: httpx.Client, prompt: list[int], count: int, *, runs: threading.Event | None = None, **fields: Any
) -> list[dict[str, Any]]:
    """`runs` is set at the first of them."""
    lines = []
    with client.stream("POST", "/generate", json=body(prompt, count, stream=True, **fields)) as reply:
        for line in filter(None, reply.iter_lines()):
            lines.append(line.removeprefix("data: "))
            if runs is not None:
                runs.set()
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def metric(client: httpx.Client, name: str) -> float:
    """The sum of a family's series."""
    text = client.get("/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}[{{ ]", line))


def wait_until(holds: Any, what: str) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


@contextlib.contextmanager
def running(clients: list[httpx.Client], count: int = 400, prefix: str = "long") -> Iterator[list[Any]]:
    """One long stream at each of the connections; yields what comes of them."""
    runs = [threading.Event() for _ in clients]
    with concurrent.futures.ThreadPoolExecutor(len(clients)) as pool:
        futures = [
            pool.submit(events, client, [i + 1, 7], count, rid=f"{prefix}-{i}", runs=runs[i])
            for i, client in enumerate(clients)
        ]
        assert all(one.wait(30) for one in runs), "they do not run"
        yield futures


def _live(server: Server) -> int:
    return sum(load["num_live_sequences"] for load in httpx.get(f"{server.url}/v1/loads", timeout=30).json()["loads"])


def converse(clients: list[httpx.Client]) -> None:
    """A session whose turns come by every front in turn, and go to one replica."""
    session = clients[0].post("/open_session", json={"capacity_of_str_len": 1000}).json()
    prompt: list[int] = []
    rid = None
    ranks = set()
    for turn, client in enumerate(clients * 2):
        new = [10 * turn + 1, 10 * turn + 2]
        reply = generate(client, new, session_params={"id": session, "rid": rid}).json()
        assert reply["meta_info"]["cached_tokens"] >= len(prompt) - 1, turn
        prompt += new
        assert reply["output_ids"] == expected(prompt, 8), turn
        prompt += reply["output_ids"]
        rid = reply["meta_info"]["id"]
        ranks.add(reply["meta_info"]["dp_rank"])
    assert len(ranks) == 1
    streamed = events(clients[1], [77], 8, session_params={"id": session, "rid": rid})
    assert streamed[-1]["output_ids"] == expected([*prompt, 77], 8)
    assert clients[-1].post("/close_session", json={"session_id": session}).status_code == 200
    assert generate(clients[1], [1], session_params={"id": session}).status_code == 400


class TestServing:
    def test_a_crowd_is_served_by_all_and_each_gets_its_own(self, server: Server) -> None:
        before = Counter(re.findall(r" front(?: (\d))?\] INFO .*POST /generate", server.log))
        prompts = [[i + 1, 2 * i + 1, 5] for i in range(64)]

        def ask(i: int) -> list[int]:
            with httpx.Client(base_url=server.url, timeout=60) as client:
                if i % 2:
                    return [token for event in events(client, prompts[i], 40)[-1:] for token in event["output_ids"]]
                return generate(client, prompts[i], 40).json()["output_ids"]

        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            outputs = list(pool.map(ask, range(64)))
        assert outputs == [expected(prompt, 40) for prompt in prompts]
        served = Counter(re.findall(r" front(?: (\d))?\] INFO .*POST /generate", server.log))
        served.subtract(before)
        assert sum(served.values()) == 64 and min(served.values()) >= 64 // NUM_FRONTS - 8, served

    def test_texts_come_whole_by_several_detokenizers(self, server: Server) -> None:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        streamed = client.completions.create(model="demo", prompt="Once", max_tokens=30, temperature=0, stream=True)
        text = "".join(event.choices[0].text for event in streamed)
        for _ in range(4):
            whole = client.completions.create(model="demo", prompt="Once", max_tokens=30, temperature=0)
            assert whole.choices[0].text == text and text
        batch = client.completions.create(model="demo", prompt=["Once", "Two", "Three"], n=2, max_tokens=30, temperature=0)
        assert [choice.index for choice in batch.choices] == list(range(6))
        assert batch.choices[0].text == text

    def test_a_client_that_leaves_ends_its_request(self, server: Server) -> None:
        with connections(server) as clients:
            for i, client in enumerate(clients):
                with client.stream("POST", "/generate", json=body([i + 1], 450, stream=True)) as reply:
                    next(reply.iter_lines())
        wait_until(lambda: _live(server) == 0, "something still runs")

    def test_a_rid_is_one_request_s_at_a_time_in_the_whole_server(self, server: Server) -> None:
        with connections(server) as clients, running(clients[:1], prefix="mine") as (future,):
            for client in clients:
                reply = generate(client, [1, 2], rid="mine-0")
                assert reply.status_code == 400
                assert "rid 'mine-0' belongs to a request that is still running" in reply.json()["error"]["message"]
            clients[1].post("/abort_request", json={"rid": "mine-0"})
            assert future.result()[-1]["meta_info"]["finish_reason"]["type"] == "abort"
            for client in clients:
                assert generate(client, [1, 2], rid="mine-0").status_code == 200


class TestAskingAny:
    """What one process was asked holds for all."""

    def test_an_abort_reaches_requests_of_all(self, server: Server) -> None:
        with connections(server) as clients, running(clients) as futures:
            assert clients[-1].post("/abort_request", json={"rid": "long-"}).status_code == 200
            ends = [future.result()[-1]["meta_info"]["finish_reason"]["type"] for future in futures]
            assert ends == ["abort"] * NUM_FRONTS

    def test_a_pause_is_everybody_s_at_once(self, server: Server) -> None:
        with connections(server) as clients:
            for asked in clients:
                assert asked.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
                assert [client.get("/ready").status_code for client in clients] == [503] * NUM_FRONTS
                assert [client.get("/health_generate").status_code for client in clients] == [200] * NUM_FRONTS
                assert asked.post("/continue_generation", json={}).status_code == 200
                assert [client.get("/ready").status_code for client in clients] == [200] * NUM_FRONTS

    def test_a_new_version_is_shown_and_stamped_by_all(self, server: Server) -> None:
        with connections(server) as clients:
            for i, asked in enumerate(clients):
                asked.post("/update_weight_version", json={"new_version": f"v{i}"})
                assert {client.get("/model_info").json()["weight_version"] for client in clients} == {f"v{i}"}
                replies = [generate(client, [1]).json()["meta_info"]["weight_version"] for client in clients]
                assert replies == [f"v{i}"] * NUM_FRONTS

    def test_a_session_is_every_front_s(self, server: Server) -> None:
        with connections(server) as clients:
            converse(clients)

    def test_numbers_are_the_whole_server_s(self, server: Server) -> None:
        with connections(server) as clients:
            before = metric(clients[0], "jaxserve:num_requests_total"), metric(clients[0], "jaxserve:generation_tokens_total")
            for client in clients:
                generate(client, [1, 2, 3], 10)
            for client in clients:
                assert metric(client, "jaxserve:num_requests_total") - before[0] == NUM_FRONTS
                assert metric(client, "jaxserve:generation_tokens_total") - before[1] == 10 * NUM_FRONTS
            with running(clients, prefix="shown") as futures:
                for client in clients:
                    assert metric(client, "jaxserve:num_live_sequences") == NUM_FRONTS
                    shown = {one["rid"] for one in client.get("/recent_requests").json()["requests"]}
                    assert {f"shown-{i}" for i in range(NUM_FRONTS)} <= shown
                clients[0].post("/abort_request", json={"abort_all": True})
                for future in futures:
                    future.result()
            infos = [client.get("/server_info").json() for client in clients]
            assert len({info["internal_states"][0]["num_finished"] for info in infos}) == 1
            assert all(info["tokenizer_worker_num"] == NUM_FRONTS for info in infos)

    def test_logging_is_configured_in_all(self, server: Server, tmp_path: Path) -> None:
        with connections(server) as clients:
            clients[0].post("/configure_logging", json={"dump_requests_folder": str(tmp_path), "dump_requests_threshold": 1})
            for i, client in enumerate(clients):
                generate(client, [1], rid=f"dumped-{i}")
            clients[1].post("/configure_logging", json={"dump_requests_folder": ""})
            lines = [line for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()]
        assert sorted(json.loads(line)["rid"] for line in lines) == [f"dumped-{i}" for i in range(NUM_FRONTS)]

    def test_a_stored_response_is_everybody_s(self, server: Server) -> None:
        apis = [openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") for _ in range(NUM_FRONTS)]
        first = apis[0].responses.create(model="demo", input="Hello", max_output_tokens=16)
        for api in apis:
            assert api.responses.retrieve(first.id).output_text == first.output_text
            later = api.responses.create(model="demo", input="And?", previous_response_id=first.id, max_output_tokens=16)
            assert later.previous_response_id == first.id
        apis[1].responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            apis[2].responses.retrieve(first.id)

    def test_bad_input_is_refused_in_the_same_words(self, server: Server) -> None:
        with connections(server) as clients:
            replies = [generate(client, [1], 8, session_params={"id": "nobody"}).json() for client in clients]
            assert replies[0]["error"]["message"].startswith("There is no session 'nobody'")
            assert all(reply == replies[0] for reply in replies)
            unknown = [client.get("/nothing/here").status_code for client in clients]
            assert unknown == [404] * NUM_FRONTS


def test_sigterm_lets_all_end_and_stacks_are_shown_before(folder: Path) -> None:
    with serving(folder, step_s=0.005, tokenizer_worker_num=2) as server:
        server.wait_for("/ready", 200)
        with connections(server, 8) as clients, running(clients, 300) as futures:
            os.kill(server.process.pid, signal.SIGQUIT)
            server.process.send_signal(signal.SIGTERM)
            outputs = [future.result() for future in futures]
            assert [len(output[-1]["output_ids"]) for output in outputs] == [300] * 8
        assert server.exit_status() == 0, server.log
        assert server.log.count("live requests; the stacks of all processes follow") == 3, server.log
        assert len(re.findall(r"Live request: rid='long-\d'", server.log)) == 8


def test_connections_are_limited_and_requests_aborted_in_the_end(folder: Path) -> None:
    with serving(folder, step_s=0.05, tokenizer_worker_num=2, limit_concurrency=5, shutdown_timeout_s=0.5) as server:
        server.wait_for("/ready", 200)
        with connections(server, 4) as clients, running(clients) as futures:
            with connections(server, 2) as more, concurrent.futures.ThreadPoolExecutor(2) as pool:  # three for each front
                futures += [pool.submit(events, client, [70 + i], 400) for i, client in enumerate(more)]
                wait_until(lambda: httpx.get(server.url + "/health", timeout=30).status_code == 503, "there is room")
                assert "all the connections it can take" in httpx.get(server.url + "/health", timeout=30).text
                server.process.send_signal(signal.SIGTERM)
                ends = [future.result()[-1]["meta_info"]["finish_reason"]["type"] for future in futures]
            assert ends == ["abort"] * 6
        assert server.exit_status() == 0, server.log


def test_keys_are_asked_for_by_all_and_a_dead_scheduler_s_clients_hear_of_it(folder: Path) -> None:
    with serving(folder, step_s=0.02, tokenizer_worker_num=2, api_key="user-key-1", admin_api_key="admin-key-2") as server:
        server.wait_for("/ready", 200)
        with connections(server, 2) as clients:
            for client in clients:
                assert generate(client, [1]).status_code == 401
                client.headers["Authorization"] = "Bearer admin-key-2"
                assert client.post("/flush_cache").status_code == 200
                client.headers["Authorization"] = "Bearer user-key-1"
                assert client.post("/pause_generation", json={}).status_code in (401, 403)
                assert client.get("/server_info").json()["api_key"] == "***"
            files = [file.read_bytes() for file in folder.rglob("jaxserve-*/*") if file.is_file()]
            assert files and not any(b"-key-" in data for data in files)
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                futures = [pool.submit(events, client, [i + 1], 400) for i, client in enumerate(clients)]
                time.sleep(0.5)
                server.child("fake_scheduler").kill()
                for future in futures:
                    assert "process ended" in json.dumps(future.result()[-1])
        assert server.exit_status() == 1
        assert "was ended by SIGKILL" in server.log


def test_sessions_and_a_replica_that_comes_back_are_everybody_s_and_a_dead_front_ends_the_server(folder: Path) -> None:
    options = {"dp_size": 2, "restart_workers": True, "load_balance_method": "round_robin"}
    with serving(folder, step_s=0.02, tokenizer_worker_num=2, **options) as server:
        server.wait_for("/ready", 200)
        with connections(server, 2) as clients:
            converse(clients)
            server.child("fake_scheduler").kill()
            wait_until(lambda: "serves again" in server.log, server.log)
            for client in clients:
                for rank in (0, 1):
                    assert generate(client, [1, 2], data_parallel_rank=rank).json()["output_ids"] == expected([1, 2], 8)
                assert client.get("/server_info").json()["replicas"] == ["up", "up"]
            server.children = psutil.Process(server.process.pid).children(recursive=True)
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                futures = [pool.submit(events, client, [i + 1], 400) for i, client in enumerate(clients)]
                wait_until(lambda: _live(server) == 2, "they do not run")
                server.child("fronts.process").kill()
                killed_s = time.monotonic()
                ends = []
                for future in futures:
                    try:
                        ends.append(json.dumps(future.result()[-1]))
                    except httpx.TransportError:
                        ends.append("broken off")
            assert sorted("process ended" in end for end in ends) == [False, True], ends
        assert server.exit_status() == 1
        assert time.monotonic() - killed_s < 8, "it waits for the dead one"
        assert re.search(r"The front process was ended by SIGKILL", server.log), server.log


def test_an_engine_has_no_fronts() -> None:
    with pytest.raises(ValueError, match="tokenizer_worker_num is of servers"):
        Engine(demo_model_path(), tokenizer_worker_num=2)
