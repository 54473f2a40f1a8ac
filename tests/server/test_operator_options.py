"""Options of the server's owner, on a server in processes of its own (with the fake scheduler)."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from server_process import Server, serving

BODY = {"text": "the secret", "rid": "mine", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True, "stop": ["@@"]}}


def until(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + 30
    while not (result := condition()):
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)
    return result


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def generate(server: Server, **body: Any) -> Any:
    reply = httpx.post(f"{server.url}/generate", json={**BODY, **body}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_server_without_a_tokenizer(folder: Path) -> None:
    with serving(folder, skip_tokenizer_init=True) as server:
        server.wait_for("/health_generate", 200)
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        reply = httpx.post(f"{server.url}/generate", json=body).json()
        assert (reply["text"], len(reply["output_ids"])) == ("", 3)
        completion = httpx.post(f"{server.url}/v1/completions", json={"prompt": [5, 6], "max_tokens": 2}).json()
        assert (completion["choices"][0]["text"], completion["usage"]["completion_tokens"]) == ("", 2)
        texts = {
            "/generate": {"text": "Hello"},
            "/v1/completions": {"prompt": "Hello"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
            "/tokenize": {"prompt": "Hello"},
            "/detokenize": {"tokens": [5]},
        }
        for path, text in texts.items():
            refused = httpx.post(server.url + path, json=text)
            assert (refused.status_code, "--skip-tokenizer-init" in refused.text) == (400, True), (path, refused.text)
        server.stop()


def test_logs_and_dumps_of_requests_while_the_server_runs(folder: Path) -> None:
    """Configured anew over HTTP, and told by a signal to show its state; it goes on serving."""
    options = {"log_requests": True, "log_requests_level": 0, "log_requests_format": "json", "api_key": "k-1-2-3"}
    options |= {"log_requests_target": ["stdout", str(folder / "logs")], "crash_dump_folder": str(folder / "crash")}
    headers = {"Authorization": "Bearer k-1-2-3"}
    with serving(folder, step_s=0.05, **options) as server:
        server.wait_for("/ready", 200)
        ask = httpx.Client(base_url=server.url, headers=headers, timeout=60)
        assert ask.post("/generate", json=BODY).status_code == 200
        (log,) = (folder / "logs").glob("*.log")
        received, finished = lines_of(log)
        assert (received["event"], received["rid"], received["obj"]["prompt_tokens"]) == ("request.received", "mine", 5)
        assert (finished["event"], finished["out"]["completion_tokens"]) == ("request.finished", 3)
        assert "secret" not in log.read_text() and "sampling_params" not in log.read_text()
        assert log.stat().st_mode & 0o077 == 0
        assert '"event": "request.finished"' in server.log

        configured = ask.post(
            "/configure_logging",
            json={"log_requests_level": 2, "dump_requests_folder": str(folder / "dump"), "dump_requests_threshold": 2},
        )
        assert (configured.status_code, configured.text) == (200, "Logging configured; the level is info.\n")
        replies = [ask.post("/generate", json={**BODY, "rid": f"r{i}"}).json() for i in range(3)]
        assert lines_of(log)[2]["obj"]["text"] == ["the secret"]
        assert lines_of(log)[3]["out"]["text"] == replies[0]["text"]
        (dump,) = (folder / "dump").glob("*/requests_*.jsonl")
        first, second = lines_of(dump)
        assert (first["rid"], second["rid"], first["request"]["text"]) == ("r0", "r1", "the secret")
        assert first["request"]["sampling_params"] == {"max_new_tokens": 3, "ignore_eos": True, "stop": ["@@"]}
        assert first["reply"]["output_ids"] == replies[0]["output_ids"]

        for wrong in ({"log_requests_level": 4}, {"log_level": "loud"}, {"dump_requests_threshold": 0}):
            assert ask.post("/configure_logging", json=wrong).status_code == 400
        refused = ask.post("/configure_logging", json={"log_level": "warning"}, headers={"Authorization": "Bearer no"})
        assert refused.status_code == 401

        long = {**BODY, "rid": "endless", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, "stream": True}
        with ask.stream("POST", "/generate", json=long) as stream:
            lines = stream.iter_lines()  # kept: when it goes, the client leaves
            next(lines)
            server.process.send_signal(signal.SIGQUIT)
            (crash,) = until(lambda: list((folder / "crash").glob("*/crash_*.jsonl")))
            until(lambda: server.log.count("(most recent call first)") >= 3 and "loop.py" in server.log)
            assert "Live request: rid='endless'" in server.log
        head, running, *recent = until(lambda: len(lines_of(crash)) == 6 and lines_of(crash))
        assert (head["reason"], head["server_args"]["api_key"]) == ("SIGQUIT", "***")
        assert (running["rid"], running["ended_s"], len(running["reply"]["output_ids"]) > 0) == ("endless", None, True)
        assert [one["rid"] for one in recent] == ["mine", "r0", "r1", "r2"]
        assert ask.post("/generate", json=BODY).status_code == 200, "it goes on"
        server.stop()
    assert "r2" in [one["rid"] for path in (folder / "dump").glob("*/*.jsonl") for one in lines_of(path)], "what was left"
    written = server.log + "".join(path.read_text() for path in folder.rglob("*.jsonl"))
    assert "k-1-2-3" not in written


def test_a_dead_worker_leaves_a_crash_dump(folder: Path) -> None:
    with serving(folder, fake="exit_step", crash_dump_folder=str(folder / "crash")) as server:
        server.wait_for("/ready", 200)
        body = {"text": "a", "rid": "last", "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
        assert httpx.post(f"{server.url}/generate", json=body, timeout=60).status_code == 500
        assert server.exit_status() == 1
    (crash,) = (folder / "crash").glob("*/crash_*.jsonl")
    head, running = lines_of(crash)
    assert head["reason"].startswith("The scheduler process ended with exit status 3.")
    assert (running["rid"], running["reply"]["meta_info"]) == ("last", {})
    assert "1 unfinished and 0 finished requests were written to" in server.log


def test_an_access_log_without_some_paths(folder: Path) -> None:
    with serving(folder, log_level_http="info", uvicorn_access_log_exclude_prefixes=["/health", "/ready"]) as server:
        server.wait_for("/ready", 200)
        assert httpx.get(f"{server.url}/v1/models").status_code == 200
        server.stop()
    assert "GET /v1/models" in server.log
    assert "GET /ready" not in server.log
