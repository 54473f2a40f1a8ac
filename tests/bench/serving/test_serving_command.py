"""`jaxserve bench serving` against servers with scripted replies: what it sends, measures, counts, saves and says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from stub_server import DONE, USAGE, Reply, ScriptedServer, chat, completion, native, serving, sse

from jaxserve.bench.record import read_records
from jaxserve.cli.main import run

FEW = ["--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "4", "--warmup-requests", "0"]
STEP_S = 0.1  # long against what a busy machine adds before the first event is read


@pytest.fixture(autouse=True)
def _no_ceiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXSERVE_API_KEY", raising=False)


def bench(server: ScriptedServer | str, path: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    url = server if isinstance(server, str) else server.url
    file = ["--output-file", str(path / "runs.jsonl"), "--output-details", "--client-ceiling", "off"]
    code = run(["bench", "serving", "--base-url", url, *FEW, *file, *options])
    return code, list(read_records(path / "runs.jsonl")) if (path / "runs.jsonl").exists() else []


NATIVE = Reply((
    (STEP_S, native(1)),
    (STEP_S, native(3)),  # two tokens in an event
    (STEP_S, native(3, prompt_tokens=7)),  # none
    (STEP_S, native(4, finish={"type": "length"}, prompt_tokens=7, cached_tokens=2, spec_verify_ct=2) + DONE),
))  # fmt: skip
COMPLETIONS = Reply((
    (STEP_S, completion("the")),
    (STEP_S, completion(" of the")),
    (STEP_S, completion("", "length")),
    (STEP_S, sse({"choices": [], "usage": USAGE}) + DONE),
))  # fmt: skip
CHAT = Reply((
    (STEP_S, chat(role="assistant", content="")),  # no token
    (STEP_S, chat(reasoning_content="the")),
    (STEP_S, chat(content=" of", usage={"completion_tokens": 4})),
    (STEP_S, chat("stop") + sse({"choices": [], "usage": USAGE}) + DONE),
))  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "reply", "first_step"), [("jaxserve", NATIVE, 1), ("vllm", COMPLETIONS, 1), ("sglang-oai-chat", CHAT, 2)]
)
def test_events_with_several_tokens_or_none(backend: str, reply: Reply, first_step: int, tmp_path: Path) -> None:
    """Whatever a busy machine adds, the server's pauses are the least that is seen."""
    with serving(reply) as server:
        code, (record,) = bench(server, tmp_path, "--backend", backend)
    assert code == 0
    assert (record["completed"], record["failed"], record["output_lens"]) == (4, 0, [4] * 4)
    assert record["total_output_tokens"] == 16
    assert record["total_input_tokens"] == 28  # as the server counts them
    assert min(record["ttfts"]) >= first_step * STEP_S
    decode_s = [e2e_s - ttft_s for e2e_s, ttft_s in zip(record["e2e_latencies"], record["ttfts"], strict=True)]
    assert max(decode_s) > 0.9 * (4 - first_step) * STEP_S
    assert record["mean_tpot_ms"] == pytest.approx(1e3 * sum(decode_s) / 4 / 3)
    gaps = record["itls"][0]
    if backend == "jaxserve":
        assert gaps[0] == gaps[1]
        assert max(one[2] for one in record["itls"]) > 1.8 * STEP_S
        assert (record["accept_length"], record["cache_report"]["total_cached_tokens"]) == (2.0, 8)
    else:
        assert len(set(gaps)) == 1
        assert max(sum(one) for one in record["itls"]) > 0.9 * STEP_S
        assert record["accept_length"] == 2.5  # of /server_info


def test_what_is_sent(tmp_path: Path) -> None:
    extra = [
        "--extra-request-body",
        '{"sampling_params": {"min_p": 0.1}, "rid": "x"}',
        "--header",
        "X-Team=a",
        "--api-key",
        "k",
    ]
    with serving(NATIVE) as server:
        bench(server, tmp_path, *extra, "--temperature", "0.5")
    path, body = server.bodies[0]
    assert path == "/generate"
    sampling = body.pop("sampling_params")
    assert 1 <= sampling.pop("max_new_tokens") <= 4
    assert sampling == {"temperature": 0.5, "ignore_eos": True, "min_p": 0.1}
    assert isinstance(body.pop("text"), str)
    assert body == {"stream": True, "rid": "x"}
    assert (server.headers[0]["X-Team"], server.headers[0]["Authorization"]) == ("a", "Bearer k")


def test_turns_of_a_conversation_follow_each_other(tmp_path: Path) -> None:
    options = ["--backend", "vllm-chat", "--dataset-name", "multi-turn", "--num-turns", "2", "--num-prompts", "1"]
    with serving(CHAT) as server:
        code, (record,) = bench(server, tmp_path, *options)
    assert (code, record["completed"]) == (0, 2)
    (_, first), (_, second) = server.bodies
    assert second["messages"][:2] == [*first["messages"], {"role": "assistant", "content": "the of"}]
    assert second["messages"][2]["role"] == "user"


def failing(kind: str) -> Reply:
    return {
        "HTTP 400": Reply(status=400, body={"error": {"message": "max_tokens is too large"}}),
        "HTTP 503": Reply(status=503, body={"message": "the queue is full"}),
        "stream cut": Reply(((0.0, native(1)),), cut=True),
        "error in the stream": Reply(((0.0, native(1)), (0.0, sse({"error": {"message": "a worker died"}}) + DONE))),
        "aborted by the server": Reply(((0.0, native(1, finish={"type": "abort", "message": "retracted"}) + DONE),)),
        "unreadable reply": Reply(((0.0, sse("{")),)),
        "timed out": Reply(((5.0, DONE),)),
    }[kind]


KINDS = {"HTTP 400": "too large", "HTTP 503": "queue is full", "stream cut": "", "error in the stream": "worker died",
         "aborted by the server": "retracted", "unreadable reply": "truncated", "timed out": "0.5 s"}  # fmt: skip


def test_failures_are_counted_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = iter([*KINDS, *KINDS])
    fails = {"now": True}

    def script(path: str, body: dict[str, Any]) -> Reply:
        fails["now"] = not fails["now"]
        return failing(next(order)) if fails["now"] and body["sampling_params"] else NATIVE

    options = ["--num-prompts", "28", "--max-concurrency", "1", "--request-timeout-s", "0.5", "--goodput", "e2el:100000"]
    with serving(script) as server:
        code, (record,) = bench(server, tmp_path, *options)
    assert code == 0
    assert (record["completed"], record["failed"], record["slo_attainment"]) == (14, 14, 0.5)
    assert {kind: seen["count"] for kind, seen in record["failures"].items()} == dict.fromkeys(KINDS, 2)
    told = capsys.readouterr().out
    for kind, words in KINDS.items():
        assert words in record["failures"][kind]["message"], kind
        assert kind in told
    assert sum(not error for error in record["errors"]) == 14
    assert record["mean_e2e_latency_ms"] >= 4e3 * STEP_S  # of those that went well


def test_no_success_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(failing("HTTP 503")) as server:
        code, (record,) = bench(server, tmp_path)
        assert (code, record["completed"], record["failed"]) == (1, 0, 4)
        assert "No request went well" in capsys.readouterr().err
        code, records = bench(server, tmp_path, "--warmup-requests", "1")
    error = capsys.readouterr().err
    assert (code, len(records)) == (1, 1)
    assert "nothing was measured. HTTP 503: the queue is full" in error


def test_what_is_wrong_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
    assert bench(nobody, tmp_path) == (1, [])
    assert "No server answers" in capsys.readouterr().err
    with serving(NATIVE) as server:
        assert bench(server, tmp_path, "--model", "other")[0] == 1
        assert "no model 'other'; it serves scripted" in capsys.readouterr().err
        assert bench(server, tmp_path / "nowhere")[0] == 1
        assert "nowhere/runs.jsonl: No such file or directory" in capsys.readouterr().err
        assert bench(server, tmp_path, "--sweep", "backend=vllm")[0] == 2
        assert bench(server, tmp_path, "--sweep", "request-rate=1,x")[0] == 2
        assert bench(server, tmp_path, "--tokenizer", str(tmp_path))[0] == 1
        assert not server.bodies


def test_a_sweep_and_what_is_asked_of_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--sweep", "max-concurrency=1,2", "--sweep", "random-output-len=3", "--flush-cache", "--profile"]
    with serving(NATIVE) as server:
        code, records = bench(server, tmp_path, *options)
    assert code == 0
    assert [(record["max_concurrency"], record["random_output_len"]) for record in records] == [(1, 3), (2, 3)]
    assert [record["max_concurrent_requests"] for record in records] == [1, 2]
    assert [record["seed"] for record in records] == [42, 42]  # as the cache is emptied
    assert server.posts == ["/flush_cache", "/start_profile", "/stop_profile"] * 2
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert table[0].split()[1:4] == ["max-concurrency", "|", "random-output-len"]
    assert len(table) == 4
    assert set(records[0]["timeline"]["num_running_reqs"]) == {3}


def test_runs_of_a_sweep_have_prompts_of_their_own(tmp_path: Path) -> None:
    with serving(NATIVE) as server:
        _, records = bench(server, tmp_path, "--sweep", "max-concurrency=1,4", "--num-prompts", "2")
    assert [record["seed"] for record in records] == [42, 43]
    assert len({body["text"] for _, body in server.bodies}) == 4


def test_several_processes_share_the_work(tmp_path: Path) -> None:
    with serving(NATIVE) as server:
        for options in (["--max-concurrency", "5"], []):
            code, records = bench(server, tmp_path, "--client-processes", "2", "--num-prompts", "15", *options)
            assert (code, records[-1]["completed"], records[-1]["client"]["processes"]) == (0, 15, 2)
            assert records[-1]["client"]["peak_concurrency"] == (5 if options else 15)


def test_the_ceiling_is_measured_once(tmp_path: Path) -> None:
    with serving(NATIVE) as server:
        _, records = bench(server, tmp_path, "--client-ceiling", "auto")
        began_s = time.monotonic()
        _, records = bench(server, tmp_path, "--client-ceiling", "auto")
    ceilings = [record["client"]["ceiling_events_per_s"] for record in records]
    assert ceilings[0] == ceilings[1] > 1000
    assert time.monotonic() - began_s < 30


@pytest.mark.parametrize("limit", [["--max-concurrency", "2"], []])
def test_ctrl_c_keeps_what_is_there(limit: list[str], tmp_path: Path) -> None:
    """Two requests are answered, the others hang: then Ctrl-C."""
    seen = {"n": 0}

    def script(path: str, body: dict[str, Any]) -> Reply:
        seen["n"] += 1
        return NATIVE if seen["n"] <= 2 else Reply(((60.0, DONE),))

    path = tmp_path / "runs.jsonl"
    with serving(script) as server:
        command = [
            sys.executable,
            "-m",
            "jaxserve",
            "bench",
            "serving",
            "--base-url",
            server.url,
            *FEW,
            "--output-file",
            str(path),
        ]
        process = subprocess.Popen(
            [*command, "--client-ceiling", "off", *limit],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        deadline_s = time.monotonic() + 30
        while seen["n"] < 4 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        time.sleep(6 * STEP_S)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30)
    assert process.returncode == 130, error
    assert error.rstrip().endswith("jaxserve: interrupted"), error
    assert "Traceback" not in error
    (record,) = read_records(path)
    assert (record["interrupted"], record["completed"], record["failed"], record["not_finished"]) == (True, 2, 0, 2)
    assert "Not finished when interrupted:" in out
