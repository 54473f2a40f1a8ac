"""A live server of two replicas: crowds, clients that leave, sessions, and a replica that is killed and comes back."""

from __future__ import annotations

import concurrent.futures
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from crowd import CROWD, LEN, ask, check, check_crowd, check_grammars, prompts
from live_server import LiveServer, running
from parity import Oracle

from jaxserve import Engine

SAMPLING = {"temperature": 0, "max_new_tokens": LEN, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, compilation_cache: str
) -> Iterator[tuple[LiveServer, Oracle]]:
    model = checkpoint("qwen3")
    options = ["--model-path", str(model), "--dp-size", "2", "--restart-workers", "--compilation-cache-dir", compilation_cache]
    options += [
        "--max-running-requests",
        "32",
        "--max-total-tokens",
        "8192",
        "--page-size",
        "16",
        "--chunked-prefill-size",
        "32",
    ]
    options += ["--enable-mixed-chunk", "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "3"]
    options += ["--decode-row-buckets", "32", "--prefill-token-buckets", "512"]
    with running(tmp_path_factory.mktemp("replicas") / "log", *options) as server:
        yield server, Oracle(model)


def states(server: LiveServer) -> list[dict[str, Any]]:
    return server.get("/server_info").json()["internal_states"]


def test_a_crowd_is_answered_as_by_transformers(served: tuple[LiveServer, Oracle]) -> None:
    server, oracle = served
    for seed in (0, 0, 1):  # new, cached, new
        check_crowd(server, oracle, seed)
    finished = [state["num_finished"] for state in states(server)]
    assert min(finished) > CROWD / 2, finished
    assert sum(state["cached_tokens"] for state in states(server)) > 64 * CROWD, "the second crowd was cached"


def test_both_replicas_follow_grammars(served: tuple[LiveServer, Oracle]) -> None:
    server, oracle = served
    for rank in (0, 1):
        check_grammars(server, oracle, data_parallel_rank=rank)


def test_who_leaves_is_aborted_wherever_it_runs(served: tuple[LiveServer, Oracle]) -> None:
    server, _ = served
    before = [state["num_aborted"] for state in states(server)]
    body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    for rank in (0, 1):
        with httpx.stream("POST", server.url + "/generate", json={**body, "data_parallel_rank": rank}, timeout=60) as reply:
            next(reply.iter_raw())
    deadline_s = time.monotonic() + 20
    while any(now["num_aborted"] <= old for now, old in zip(states(server), before, strict=True)):
        assert time.monotonic() < deadline_s, states(server)
        time.sleep(0.05)
    server.assert_whole()


def test_a_session_stays_where_its_past_is(served: tuple[LiveServer, Oracle]) -> None:
    """Of eight, half of them begin on each replica; beside them a crowd comes."""
    server, oracle = served
    crowd, firsts = prompts(oracle, 4), prompts(oracle, 5)

    def converse(index: int) -> list[tuple[list[int], dict[str, Any]]]:
        """Each turn's whole prompt, and its reply."""
        session = {"id": server.post("/open_session", {"capacity_of_str_len": 1000}).json()}
        history: list[int] = []
        turns = []
        where = {"data_parallel_rank": index % 2}  # where the others go is for the session to know
        for new in (firsts[2 * index + 1], [7 + index] * 20, [9, 8, 7]):
            reply = server.generate(input_ids=new, session_params=session, sampling_params=SAMPLING, **where)
            history = [*history, *new]
            turns.append((history, reply))
            history = [*history, *reply["output_ids"]]
            session, where = {**session, "rid": reply["meta_info"]["id"]}, {}
        assert server.post("/close_session", {"session_id": session["id"]}).status_code == 200
        return turns

    with concurrent.futures.ThreadPoolExecutor(CROWD + 8) as pool:
        answers = pool.map(ask, itertools.repeat(server), range(CROWD), crowd)
        sessions = list(pool.map(converse, range(8)))
    for prompt, answer in zip(crowd, answers, strict=True):
        check(oracle, prompt, answer)
    for index, turns in enumerate(sessions):
        assert [reply["meta_info"]["dp_rank"] for _, reply in turns] == [index % 2] * 3
        for prompt, reply in turns:
            check(oracle, prompt, reply["output_ids"])
        for (before, reply), (_, later) in itertools.pairwise(turns):
            whole_pages = (len(before) + LEN - 1) // 16 * 16  # no step has computed what the last token adds
            assert later["meta_info"]["cached_tokens"] >= whole_pages > 64, (index, reply, later)
    server.assert_whole()


def test_a_killed_replica_comes_back(served: tuple[LiveServer, Oracle]) -> None:
    server, oracle = served
    crowd = prompts(oracle, 2)
    assert server.post("/slow_down", {"forward_sleep_time": 0.05}).status_code == 200

    def attempt(prompt: list[int]) -> httpx.Response:
        params = {"temperature": 0, "max_new_tokens": LEN, "ignore_eos": True}
        return server.post("/generate", {"input_ids": prompt, "sampling_params": params})

    with concurrent.futures.ThreadPoolExecutor(CROWD) as pool:
        replies = pool.map(attempt, crowd)
        while min(load["num_live_sequences"] for load in server.get("/v1/loads").json()["loads"]) < 10:
            time.sleep(0.02)
        server.schedulers()[1].kill()
        answers = list(replies)
    lost = [reply for reply in answers if reply.status_code == 500]
    assert 0 < len(lost) < CROWD
    assert all("scheduler 1 process ended" in reply.text for reply in lost)
    for prompt, reply in zip(crowd, answers, strict=True):
        if reply.status_code == 200:
            check(oracle, prompt, reply.json()["output_ids"])
    deadline_s = time.monotonic() + 120
    while server.get("/server_info").json()["replicas"] != ["up", "up"]:
        assert server.get("/health").status_code == 200
        assert time.monotonic() < deadline_s, server.log.read_text()
        time.sleep(0.2)
    assert [state["forward_sleep_time"] for state in states(server)] == [0.05, 0.05]
    assert server.post("/slow_down", {"forward_sleep_time": None}).status_code == 200
    for rank in (0, 1):
        body = {"temperature": 0, "max_new_tokens": LEN, "ignore_eos": True}
        reply = server.generate(input_ids=crowd[3], data_parallel_rank=rank, sampling_params=body)
        check(oracle, crowd[3], reply["output_ids"])
    assert 'jaxserve:replica_restarts_total{dp_rank="1"' in server.get("/metrics").text


def test_an_engine_of_two_replicas(checkpoint: Callable[[str], Path], compilation_cache: str) -> None:
    model = checkpoint("qwen3")
    oracle = Oracle(model)
    options: dict[str, Any] = {
        "max_running_requests": 32,
        "max_total_tokens": 8192,
        "page_size": 16,
        "chunked_prefill_size": 32,
    }
    options |= {"decode_row_buckets": [32], "prefill_token_buckets": [512], "compilation_cache_dir": compilation_cache}
    params = {"temperature": 0, "max_new_tokens": LEN, "ignore_eos": True}
    with Engine(str(model), dp_size=2, restart_workers=True, load_balance_method="round_robin", **options) as engine:
        crowd = prompts(oracle, 3)
        replies = engine.generate(input_ids=crowd, sampling_params=params)
        for prompt, reply in zip(crowd, replies, strict=True):
            check(oracle, prompt, reply["output_ids"])
        assert [state["num_finished"] for state in engine.get_server_info()["internal_states"]] == [33, 33], "and warm-ups"
        for rank in (0, 1):
            reply = engine.generate(input_ids=crowd[0], sampling_params=params, data_parallel_rank=rank)
            check(oracle, crowd[0], reply["output_ids"])
        with pytest.raises(ValueError, match=r"data_parallel_rank must be in \[0, 2\)"):
            engine.generate(input_ids=[1], sampling_params=params, data_parallel_rank=2)
        assert engine.flush_cache().success
