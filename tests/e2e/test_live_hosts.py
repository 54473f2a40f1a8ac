"""A live server over two hosts, both of them this machine, with a device each: half of every layer, or half of the layers.

Crowds, grammars, clients that leave, profiles, bad starts, a host with less memory, and one that is killed. Weights and every
kind of request: `make deployments` runs test_live_weights and test_live_everything over two hosts as well.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from crowd import CROWD, LEN, ask, check, check_crowd, check_grammars
from live_server import (
    LiveServer,
    ending,
    environment,
    follower_log,
    free_ports,
    launch_hosts,
    running,
    wait_ready,
)
from parity import Oracle

from jaxserve import Engine

OPTIONS = """
    --max-running-requests 32 --max-total-tokens 8192 --page-size 16 --chunked-prefill-size 32 --enable-mixed-chunk
    --speculative-algorithm NGRAM --speculative-num-draft-tokens 3 --decode-row-buckets 32 --prefill-token-buckets 512
""".split()  # noqa: SIM905


DEVICES = [["--tp-size", "2"], ["--pp-size", "2"]]


@pytest.fixture(scope="module")
def base_options(checkpoint: Callable[[str], Path], compilation_cache: str) -> list[str]:
    return ["--model-path", str(checkpoint("qwen3")), "--compilation-cache-dir", compilation_cache, *OPTIONS]


@pytest.fixture(scope="module", params=DEVICES, ids="".join)
def served(
    request: pytest.FixtureRequest,
    base_options: list[str],
    checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[LiveServer, Oracle]]:
    with running(tmp_path_factory.mktemp("hosts") / "log", *base_options, *request.param, num_hosts=2) as server:
        yield server, Oracle(checkpoint("qwen3"))


def test_a_crowd_is_answered_as_by_transformers(served: tuple[LiveServer, Oracle]) -> None:
    server, oracle = served
    for seed in (0, 0):  # new, cached
        check_crowd(server, oracle, seed)
    state = server.internal_state()
    assert state["cached_tokens"] > 64 * CROWD, "the second crowd was cached"
    assert len(state["runner"]["hosts"]) == 2


def test_grammars_are_followed(served: tuple[LiveServer, Oracle]) -> None:
    check_grammars(*served)


def test_who_leaves_is_aborted(served: tuple[LiveServer, Oracle]) -> None:
    server, oracle = served
    before = server.internal_state()["num_aborted"]
    body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
    with httpx.stream("POST", server.url + "/generate", json=body, timeout=60) as reply:
        next(reply.iter_raw())
    deadline_s = time.monotonic() + 20
    while server.internal_state()["num_aborted"] == before:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    check(oracle, [5, 6, 7], ask(server, 1, [5, 6, 7]))


def test_a_profile_is_taken_of_each_host(served: tuple[LiveServer, Oracle], tmp_path: Path) -> None:
    server, _ = served
    reply = server.post("/start_profile", {"output_dir": str(tmp_path), "num_steps": 3})
    assert reply.status_code == 200, reply.text
    server.generate(text="x", sampling_params={"max_new_tokens": 8, "ignore_eos": True})
    deadline_s = time.monotonic() + 60
    while len(traces := list(tmp_path.rglob("*.xplane.pb"))) < 2:
        assert time.monotonic() < deadline_s, traces
        time.sleep(0.2)
    assert ["host-1" in str(trace) for trace in sorted(traces)].count(True) == 1


FOLLOW = "import json, sys, jaxserve; jaxserve.Engine.follow(**json.loads(sys.argv[1]))"


def test_an_engine_and_a_script_that_follows(checkpoint: Callable[[str], Path], compilation_cache: str, tmp_path: Path) -> None:
    """With weights that Orbax reads, which has its own ways with several processes."""
    source, converted = checkpoint("qwen3"), tmp_path / "orbax"
    command = [sys.executable, "-m", "jaxserve", "convert", "--model-path", str(source), "--output", str(converted)]
    subprocess.run(command, env=environment(), capture_output=True, timeout=120, check=True)
    options: dict[str, Any] = {
        "model_path": str(converted), "tp_size": 2, "max_running_requests": 4, "max_total_tokens": 4096, "nnodes": 2,
        "decode_row_buckets": [4], "prefill_token_buckets": [512], "dist_init_addr": f"127.0.0.1:{free_ports(3)}",
        "compilation_cache_dir": compilation_cache,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"An Engine is host 0; got node_rank 1\."):
        Engine(**options, node_rank=1)
    script = [sys.executable, "-c", FOLLOW, json.dumps({**options, "node_rank": 1})]
    with subprocess.Popen(script) as follower:
        with Engine(**options) as engine:
            prompts = [[5, 6, 7, 8], list(range(3, 90))]
            sampling = {"temperature": 0, "max_new_tokens": LEN, "ignore_eos": True}
            replies = engine.generate(input_ids=prompts, sampling_params=sampling)
        assert follower.wait(30) == 0
    for prompt, reply in zip(prompts, replies, strict=True):
        check(Oracle(source), prompt, reply["output_ids"])


def ends(server: LiveServer, timeout_s: float) -> list[str]:
    """What the logs of all hosts say, once all have ended with status 1."""
    for process in (server.process, *server.followers.values()):
        assert process.wait(timeout_s) == 1
    return [server.log.read_text(), *(follower_log(server.log, rank).read_text() for rank in server.followers)]


POOR = """
import psutil

whole = psutil.virtual_memory
psutil.virtual_memory = lambda: whole()._replace(available=4 << 20)
"""


def test_pools_are_as_large_as_the_host_with_the_least_memory_has_room_for(
    checkpoint: Callable[[str], Path], compilation_cache: str, tmp_path: Path
) -> None:
    """Whichever host that is: one of them sees 4 MiB, the other what this machine has."""
    (tmp_path / "sitecustomize.py").write_text(POOR)
    options = ["--model-path", str(checkpoint("qwen3")), "--compilation-cache-dir", compilation_cache, *DEVICES[0]]
    options += ["--mem-fraction-static", "1", "--max-running-requests", "8"]  # which could use 8 * 512 tokens
    options += ["--decode-row-buckets", "8", "--prefill-token-buckets", "512"]
    found = []
    for poor in (0, 1):
        paths = [{"PYTHONPATH": str(tmp_path) if rank == poor else ""} for rank in (0, 1)]
        server = launch_hosts(tmp_path / "log", 2, *options, env={**os.environ, **paths[0]}, followers_env=paths[1])
        with ending(server):
            wait_ready(server)
            found.append(server.internal_state()["max_total_num_tokens"])
    assert found[0] == found[1]
    assert 0 < found[0] < 8 * 512


@pytest.mark.parametrize("devices", DEVICES, ids="".join)
@pytest.mark.parametrize("victim", ["scheduler of host 0", "host 1"])
def test_a_lost_host_ends_all_by_its_name(base_options: list[str], tmp_path: Path, victim: str, devices: list[str]) -> None:
    with ending(launch_hosts(tmp_path / "log", 2, *base_options, *devices)) as server:
        wait_ready(server)
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            replies = [pool.submit(server.post, "/generate", body) for _ in range(8)]
            time.sleep(0.3)
            pid = server.followers[1].pid if victim == "host 1" else server.process.pid
            (process,) = [child for child in psutil.Process(pid).children() if "detokenizer" not in " ".join(child.cmdline())]
            killed_s = time.monotonic()
            process.kill()
            assert {reply.result().status_code for reply in replies} == {500}
        first, second = ends(server, 10)
        assert time.monotonic() - killed_s < 10
    if victim == "host 1":
        assert "was lost: its connection is gone." in first and "Host 1 (" in first
    else:
        assert "Host 0 at 127.0.0.1" in second and "was lost: its connection is gone." in second


def test_starts_that_cannot_be_end_everywhere_with_a_sentence(base_options: list[str], tmp_path: Path) -> None:
    """One host is missing, and one has another secret."""
    environment = {"JAXSERVE_DIST_SECRET": "a secret of many characters"}
    late = launch_hosts(tmp_path / "late", 3, *base_options[:-4], "--tp-size", "3", "--dist-timeout", "12", only=(0, 2))
    options = [*base_options, *DEVICES[0], "--dist-timeout", "12"]
    wrong = launch_hosts(tmp_path / "wrong", 2, *options, followers_env=environment)
    with ending(late), ending(wrong):
        first, second = ends(late, 60)
        sentence = "Host 1 did not come to 127.0.0.1"
        assert sentence in first and sentence in second
        first, second = ends(wrong, 60)
        assert "Host 1 did not come to 127.0.0.1" in first and "connections came with another secret." in first
        assert "does not take this host: it has another secret." in second
    assert "Traceback" not in first + second


def another_host(server: LiveServer, index: int, *options: str, env: dict[str, str] | None = None) -> None:
    """Started as its host 0 was, but for these options."""
    command = server.process.args
    assert isinstance(command, list)
    with follower_log(server.log, index).open("wb") as terminal:
        server.followers[index] = subprocess.Popen(
            [*command, *options], stdout=terminal, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
        )


def test_hosts_that_do_not_fit_end_everywhere_with_a_sentence(base_options: list[str], tmp_path: Path) -> None:
    """A rank comes twice, an option is another, a version is another."""
    (tmp_path / "sitecustomize.py").write_text("import jaxserve; jaxserve.__version__ = '0.0.0'")
    twice = launch_hosts(tmp_path / "twice", 3, *base_options, "--tp-size", "3", only=(0,))
    option, version = (
        launch_hosts(tmp_path / name, 2, *base_options, *DEVICES[0], only=(0,)) for name in ("option", "version")
    )
    with ending(twice), ending(option), ending(version):
        another_host(twice, 1, "--node-rank", "1")
        another_host(twice, 2, "--node-rank", "1")
        another_host(option, 1, "--node-rank", "1", "--page-size", "32")
        another_host(version, 1, "--node-rank", "1", env={"PYTHONPATH": str(tmp_path)})
        for server, sentence in (
            (twice, r"Two hosts have --node-rank 1: \S+ and \S+\."),
            (option, r"Host 1 \(\S+\) was given --page-size 32, host 0 16: all hosts need the same\."),
            (version, r"Host 1 \(\S+\) runs jaxserve 0\.0\.0 \(source .*\) with JAX \S+, host 0 jaxserve "),
        ):
            for log in ends(server, 60):
                assert len(re.findall(sentence, log)) == 1, log
                assert "Traceback" not in log
