"""Start, readiness, drain and death of a live server's processes. Nothing is left behind, whatever happens."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from live_server import LiveServer, environment, free_port, launch, wait_ready


@pytest.fixture
def options(checkpoint: Callable[[str], Path], compilation_cache: str) -> list[str]:
    """Starts fast: few buckets, all of them shared by the tests here."""
    options = ["--model-path", str(checkpoint("qwen3")), "--max-running-requests", "4", "--max-total-tokens", "4096"]
    return [*options, "--chunked-prefill-size", "16", "--decode-row-buckets", "4", "--compilation-cache-dir", compilation_cache]


def family(server: LiveServer) -> list[psutil.Process]:
    return [server.main_process(), *server.main_process().children(recursive=True)]


def assert_gone(processes: list[psutil.Process], timeout_s: float = 10) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert not [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE], alive


def submit_running(server: LiveServer, pool: Executor, count: int) -> list[Future[httpx.Response]]:
    """Requests of 300 tokens that run, so slowly that none is over before the test goes on."""
    assert server.post("/slow_down", {"forward_sleep_time": 0.1}).status_code == 200
    request = {"text": "hello", "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
    replies = [pool.submit(server.post, "/generate", request) for _ in range(count)]
    deadline_s = time.monotonic() + 25
    while (state := server.internal_state())["num_running_reqs"] < count:
        assert time.monotonic() < deadline_s, state
    return replies


def test_health_says_503_until_ready(options: list[str], tmp_path: Path) -> None:
    server = launch(tmp_path / "log", *options)
    try:
        seen: list[int] = []
        while not seen or seen[-1] != 200:
            assert server.process.poll() is None, server.log.read_text()
            try:
                seen.append(server.get("/health").status_code)
                assert server.get("/ready").status_code in (200, 503)
            except httpx.TransportError:
                time.sleep(0.02)
        assert seen[0] == 503
        assert set(seen) == {200, 503}
    finally:
        processes = family(server)
        assert server.stop() == 0
        assert_gone(processes)


def test_sigterm_lets_running_requests_finish(options: list[str], tmp_path: Path) -> None:
    server = launch(tmp_path / "log", *options)
    wait_ready(server)
    processes = family(server)
    with ThreadPoolExecutor(3) as pool:
        replies = submit_running(server, pool, 3)
        assert server.post("/slow_down", {"forward_sleep_time": None}).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        for reply in replies:
            assert reply.result().json()["meta_info"]["completion_tokens"] == 300
    assert server.process.wait(30) == 0
    assert_gone(processes)


@pytest.mark.parametrize("worker", ["scheduler", "detokenizer"])
def test_a_dead_worker_ends_the_server_with_its_reason(options: list[str], tmp_path: Path, worker: str) -> None:
    server = launch(tmp_path / "log", *options)
    wait_ready(server)
    processes = family(server)
    with ThreadPoolExecutor(1) as pool:
        [pending] = submit_running(server, pool, 1)
        server.workers()[worker].kill()
        reply = pending.result()
        assert reply.status_code in (500, 503)
        assert worker in reply.text
    assert server.process.wait(30) not in (0, None)
    assert worker in server.log.read_text()
    assert "SIGKILL" in server.log.read_text()
    assert_gone(processes)


def test_a_killed_server_leaves_no_orphans(options: list[str], tmp_path: Path) -> None:
    server = launch(tmp_path / "log", *options)
    wait_ready(server)
    processes = family(server)
    assert len(processes) >= 3
    server.process.kill()
    server.process.wait()
    assert_gone(processes)


def serve(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxserve", "serve", "--port", str(free_port()), *options]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)


def one_line_error(result: subprocess.CompletedProcess[str]) -> str:
    """The last line of a failed start; fails if there is a traceback."""
    assert result.returncode != 0, result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_a_port_in_use_is_named(options: list[str], tmp_path: Path) -> None:
    server = launch(tmp_path / "log", *options)
    try:
        wait_ready(server)
        port = server.url.rpartition(":")[2]
        result = serve(*options, "--port", port)
        assert f"127.0.0.1:{port}" in one_line_error(result)
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (["--model-path", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--page-size", "0"], "--page-size must be in [1, 128]; got 0"),
        (["--no-such-option"], "--no-such-option"),
        (["--schedule-policy", "magic"], "magic"),
        (["--tp-size", "3"], "--tp-size"),
        (["--dp-size", "0"], "--dp-size must be at least 1; got 0"),
        (["--load-balance-method", "magic"], "magic"),
        (["--context-length", "99999"], "--context-length must be at most"),
        (["--enable-mixed-chunk", "--chunked-prefill-size", "-1"], "--enable-mixed-chunk"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_options_are_one_line_and_a_non_zero_exit(options: list[str], bad: list[str], says: str) -> None:
    assert says in one_line_error(serve(*options, *bad))


def test_a_corrupt_checkpoint_names_the_file(options: list[str], checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in checkpoint("qwen3").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in one_line_error(serve(*options, "--model-path", str(folder)))
    weights.unlink()
    assert "safetensors" in one_line_error(serve(*options, "--model-path", str(folder)))
