"""The server process: early HTTP, signals, exit statuses, and a process table without leftovers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from server_process import serving

from jaxserve.config import ServerArgs
from jaxserve.server.http.uvicorn_server import FLUSH_S
from jaxserve.server.launch import bind


def test_starting_answers_503_and_ends_at_once(folder: Path) -> None:
    with serving(folder, fake="hang") as server:
        server.wait_for("/health", 503)
        assert server.status("/ready") == 503
        reply = httpx.post(server.url + "/generate", json={"text": "a"}, timeout=10)
        assert reply.status_code == 503
        assert "starting" in reply.text
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_status() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(folder: Path, number: signal.Signals) -> None:
    """A running stream ends properly, new requests get 503, and the exit status is 0."""
    with serving(folder, step_s=0.02) as server:
        server.wait_for("/ready", 200)
        seen = threading.Event()
        events: list[Any] = []

        def stream() -> None:
            body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
            with httpx.stream("POST", server.url + "/generate", json=body, timeout=60) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: "):
                        events.append(line.removeprefix("data: "))
                        seen.set()

        thread = threading.Thread(target=stream)
        thread.start()
        assert seen.wait(30)
        server.process.send_signal(number)
        while server.status("/health") != 503:
            time.sleep(0.01)
        assert httpx.post(server.url + "/generate", json={"text": "a"}, timeout=10).status_code == 503
        thread.join()
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["meta_info"]["completion_tokens"] == 100
        assert server.exit_status() == 0
        assert "Traceback" not in server.log


def test_a_drain_ends_when_its_time_is_over(folder: Path) -> None:
    with serving(folder, step_s=0.05, shutdown_timeout_s=0.5) as server:
        server.wait_for("/ready", 200)
        events: list[str] = []
        seen = threading.Event()

        def stream() -> None:
            body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
            with httpx.stream("POST", server.url + "/generate", json=body, timeout=60) as reply:
                for line in reply.iter_lines():
                    events.append(line)
                    seen.set()

        thread = threading.Thread(target=stream)
        thread.start()
        assert seen.wait(30)
        started_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_status() == 0
        assert time.monotonic() - started_s < 5
        thread.join()
        assert "data: [DONE]" in events
        assert "Aborting 1 requests that are still running after 0.5 s." in server.log


def test_the_default_drain_fits_the_30_s_that_kubernetes_gives() -> None:
    """With what comes after it: replies are flushed, and workers end (a second, as benchmarks/results/shutdown.md saw)."""
    assert ServerArgs().shutdown_timeout_s + FLUSH_S <= 26


def test_a_second_signal_hurries(folder: Path) -> None:
    with serving(folder, step_s=0.2) as server:
        server.wait_for("/ready", 200)
        outcome: list[int] = []

        def request() -> None:
            body = {"text": "a", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
            outcome.append(httpx.post(server.url + "/generate", json=body, timeout=60).status_code)

        thread = threading.Thread(target=request)
        thread.start()
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("/health", 503)
        started_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_status() == 128 + signal.SIGTERM
        assert time.monotonic() - started_s < 10
        thread.join()
        assert outcome == [500]


@pytest.mark.parametrize("victim", ["fake_scheduler", "detokenizer"])
def test_a_killed_worker_ends_the_server_with_its_reason(folder: Path, victim: str) -> None:
    with serving(folder) as server:
        server.wait_for("/ready", 200)
        server.child(victim).kill()
        assert server.exit_status() == 1
        assert f"The {victim.removeprefix('fake_')} process was ended by SIGKILL" in server.log
        assert "Traceback" not in server.log


def test_a_dead_workers_last_words_are_the_logs(folder: Path) -> None:
    """Clients read that it ended."""
    with serving(folder, fake="exit_step") as server:
        server.wait_for("/ready", 200)
        body = {"text": "a", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        reply = httpx.post(server.url + "/generate", json=body, timeout=60)
        message = "The server's scheduler process ended. The request could not be finished."
        assert (reply.status_code, reply.json()["error"]["message"]) == (500, message)
        assert server.exit_status() == 1
        assert "ERROR The scheduler process ended with exit status 3. Its last output:\n" in server.log
        assert "ERROR what others asked for\n" in server.log


def test_nothing_that_users_send_begins_a_line_of_the_log(folder: Path) -> None:
    """Not in the main process, not in a worker, not in uvicorn's lines."""
    forged = "a\r\n[2026-01-01 00:00:00] ERROR forged\x1b[2J\u2028[2026-01-01 00:00:00] ERROR forged"
    with serving(folder, log_requests=True, log_level_http="info") as server:
        server.wait_for("/ready", 200)
        params = {"max_new_tokens": 1, "stop": [forged]}
        body = {"text": "a", "rid": forged, "sampling_params": params}
        assert httpx.post(server.url + "/generate", json=body, timeout=60).status_code == 200
        assert httpx.post(server.url + "/abort_request", json={"rid": forged}, timeout=60).status_code == 200
        assert server.status("/" + urllib.parse.quote(forged)) == 404
        server.process.send_signal(signal.SIGTERM)
        server.exit_status()
    assert server.log.count("forged") > 4, "the test is void"
    assert "\x1b" not in server.log
    assert "\u2028" not in server.log
    lines = server.log_path.read_bytes().decode().split("\n")
    assert not [line for line in lines if line.startswith(("[2026-01-01", "\r"))]
    assert "\r" not in server.log_path.read_bytes().decode()


def test_a_killed_server_leaves_no_orphans(folder: Path) -> None:
    with serving(folder) as server:
        server.wait_for("/ready", 200)
        (left,) = folder.glob("jaxserve-*")
        server.process.kill()
        assert server.exit_status() == -signal.SIGKILL
        assert left.is_dir(), "nobody was left to remove it"
        with serving(folder) as successor:
            successor.wait_for("/ready", 200)
            assert not left.exists()
            successor.process.send_signal(signal.SIGTERM)
            assert successor.exit_status() == 0


def test_a_stopped_server_goes_on_or_ends_whole(folder: Path) -> None:
    """Workers neither end nor spin while nobody reads what they send; when the main process is killed, they end too."""
    with serving(folder) as server:
        server.wait_for("/ready", 200)
        main = psutil.Process(server.process.pid)
        workers = main.children(recursive=True)
        os.kill(main.pid, signal.SIGSTOP)
        time.sleep(1.5)
        assert len(workers) >= 2 and all(worker.is_running() for worker in workers)
        os.kill(main.pid, signal.SIGCONT)
        reply = httpx.post(server.url + "/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 2}}, timeout=30)
        assert reply.status_code == 200
        os.kill(main.pid, signal.SIGSTOP)
        server.process.kill()
        assert server.exit_status() == -signal.SIGKILL
        _, left = psutil.wait_procs(workers, timeout=10)
        assert not [worker for worker in left if worker.status() != psutil.STATUS_ZOMBIE]
        tidy_up = "from jaxserve.ipc import IpcPaths; IpcPaths.create().remove()"
        subprocess.run([sys.executable, "-c", tidy_up], env=os.environ | {"TMPDIR": str(folder)}, check=True)


@pytest.mark.parametrize(
    ("fake", "options", "words"),
    [
        ("user_error", {}, "--model-path 'nowhere' does not exist."),
        ("crash", {}, "RuntimeError: the device is on fire"),
        ("exit", {}, "ERROR last line before the end"),
        ("", {"tokenizer_path": "/nowhere"}, "The tokenizer folder '/nowhere' does not exist."),
        ("", {"chat_template": "/nowhere"}, "--chat-template '/nowhere' cannot be read"),
        ("", {"host": "no.such.host.invalid"}, "Cannot listen on no.such.host.invalid"),
        ("", {"api_key_file": "/nowhere"}, "--api-key-file '/nowhere' cannot be read: No such file"),
        ("", {"ssl_certfile": "/nowhere", "ssl_keyfile": "/nowhere"}, "--ssl-certfile '/nowhere'"),
    ],
)
def test_a_failed_start_says_why_and_ends_with_1(folder: Path, fake: str, options: dict[str, Any], words: str) -> None:
    with serving(folder, fake, **options) as server:
        assert server.exit_status() == 1
        assert words in server.log
        assert ("Traceback" in server.log) == (fake == "crash")


@pytest.mark.parametrize("key", [None, "secret"])
def test_a_terminal_is_told_how_to_try_it_and_a_file_is_not(
    folder: Path, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXSERVE_TERMINAL_COLUMNS", "80" if key else "0")
    with serving(folder, **({"api_key": key} if key else {})) as server:
        server.wait_for("/ready", 200)
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_status() == 0
        hint = f"Try it in another terminal: jaxserve chat --url {server.url} --api-key ...   The API: {server.url}/docs"
        assert (hint in server.log) == bool(key)
        assert ("\x1b" in server.log) == bool(key)
        assert "secret" not in server.log


def test_a_port_in_use_is_found_before_anything_starts(folder: Path) -> None:
    with bind("127.0.0.1", 0) as taken, serving(folder, port=taken.getsockname()[1]) as server:
        assert server.exit_status() == 1
        assert f"Cannot listen on 127.0.0.1:{taken.getsockname()[1]}: Address already in use." in server.log
        assert len(server.log.strip().splitlines()) == 1


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("localhost", None)])
def test_bind_listens_at_once(host: str, family: socket.AddressFamily | None) -> None:
    with bind(host, 0) as listener, socket.create_connection(listener.getsockname()[:2], timeout=5):
        assert family in (None, listener.family)
