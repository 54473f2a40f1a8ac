"""The examples on Ray, each on a cluster of its own on this machine.

Ray is no requirement of the tests: docs/deployment.md says how these are run.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest
from live_server import environment, free_port, free_ports
from test_examples import EXAMPLES

pytest.importorskip("ray")
pytestmark = pytest.mark.matrix

MARK = "TEST_OF_RAY_EXAMPLES"
PROMPT = {"text": "1, 2, 3,", "sampling_params": {"temperature": 0, "max_new_tokens": 4}}


class Example:
    """What a test's examples are started with, by which their processes are found again."""

    def __init__(self, cache: str) -> None:
        self._mark = uuid.uuid4().hex
        self._env = {**environment(), "XDG_CACHE_HOME": cache, MARK: self._mark, "RAY_USAGE_STATS_ENABLED": "0"}

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(EXAMPLES / name), *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._env)

    def run(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        with self.start(name, *arguments) as process:
            shown, errors = process.communicate(timeout=500)
        return subprocess.CompletedProcess(name, process.returncode, shown, errors)

    def workers(self, module: str = "") -> list[psutil.Process]:
        """Processes of engines."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if f"jaxserve.server.{module}" in " ".join(process.cmdline()) and process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found


@pytest.fixture
def example(compilation_cache: str) -> Iterator[Example]:
    """Leaves no process of an engine behind."""
    example = Example(compilation_cache)
    yield example
    _, left = psutil.wait_procs(example.workers(), timeout=20)
    assert not left


def test_replicas_share_the_prompts(example: Example) -> None:
    ended = example.run("ray_engine.py", "--prompts", "40")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("40 prompts, 960 tokens in "), ended.stdout


def test_a_lost_replica_is_named_and_the_others_do_its_work(example: Example) -> None:
    ended = example.run("ray_engine.py", "--prompts", "64", "--lose-one")
    assert ended.returncode == 0, ended.stderr
    lost, done = ended.stdout.splitlines()
    assert lost.startswith("A replica is lost, 1 are left: ")
    assert done.startswith("64 prompts, 1536 tokens in ")


def test_what_cannot_start_is_a_sentence(example: Example) -> None:
    ended = example.run("ray_engine.py", "--replicas", "1", "--model", "/no/such/model")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("A replica could not start: ValueError: "), ended.stderr
    ended = example.run("ray_engine.py", "--replicas", "1", "--gpus", "1000", "--timeout", "1")
    assert ended.returncode == 1
    assert ended.stderr.startswith("The cluster has no room for 1 replicas of "), ended.stderr


def test_hosts_are_one_engine(example: Example) -> None:
    ended = example.run("ray_hosts.py", "--pack", "--port", str(free_ports(3)))
    assert ended.returncode == 0, ended.stderr
    first, second, last = ended.stdout.splitlines()
    assert first.startswith("'The capital of France is' -> ")
    assert second.startswith("'1, 2, 3,' -> ' 4, 5, 6,")
    assert last == "2 hosts answered and have ended"


def answers(url: str) -> bool:
    try:
        return httpx.post(url, json=PROMPT, timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def test_serve_answers_streams_refuses_and_replaces(example: Example) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    with example.start("ray_serve.py", "--replicas", "1", "--port", str(port)) as process:
        try:
            wait_until(lambda: answers(url), 300)
            reply = httpx.post(url, json=PROMPT, timeout=60).json()
            assert reply["text"] == " 4, "
            streamed = httpx.post(url, json={**PROMPT, "stream": True}, timeout=60).text.split("\n\n")
            *parts, done, _ = [part.removeprefix("data: ") for part in streamed]
            assert (json.loads(parts[-1])["text"], done) == (reply["text"], "[DONE]")
            for body in (b"nonsense", b"[]", b'{"text": "a", "self": 1}', b'{"text": "a", "sampling_params": {"top_p": 2}}'):
                refused = httpx.post(url, content=body, timeout=60)
                assert (refused.status_code, refused.json()["error"]["code"]) == (400, 400)
            (scheduler,) = example.workers("scheduler_process")
            scheduler.kill()
            wait_until(lambda: example.workers("scheduler_process") not in ([], [scheduler]) and answers(url), 200)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


def wait_until(holds: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(1)
