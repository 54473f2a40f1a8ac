"""What a server dumped, replayed against it: greedy and seeded answers are the same, and what was changed is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from live_server import LiveServer

from jaxserve.cli.main import run


def dumped(server: LiveServer, folder: Path) -> Path:
    """A file with five sequences, one of which is drawn without a seed and two are of one prompt."""
    configured = {"dump_requests_folder": str(folder), "dump_requests_threshold": 5}
    assert server.post("/configure_logging", configured).status_code == 200
    params = {"max_new_tokens": 12, "temperature": 0, "stop": ["@@"]}
    server.generate(text="The radix cache", sampling_params={**params, "n": 2}, stream=False)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0}
    assert server.post("/v1/chat/completions", {**chat, "stream": True}).status_code == 200
    server.generate(text="Draw", sampling_params={"max_new_tokens": 8, "sampling_seed": 7})
    server.generate(text="Draw", sampling_params={"max_new_tokens": 8, "temperature": 1.5})
    assert server.post("/configure_logging", {"dump_requests_folder": ""}).status_code == 200
    (file,) = folder.rglob("requests_*.jsonl")
    return file


def test_replay(demo_server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = dumped(demo_server, tmp_path)
    url = demo_server.url.removeprefix("http://")
    assert run(["bench", "replay", str(file), "--base-url", url, "--speed", "inf"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "5 of 5 requests replayed: 5 as then, 0 different; the tokens of 4 could be compared."

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[0]["reply"]["output_ids"][3] += 1
    lines[1]["request"]["sampling_params"]["max_new_tokens"] = -5
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(["bench", "replay", str(file), "--base-url", url, "--speed", "50"]) == 1
    *told, last = capsys.readouterr().out.splitlines()
    assert "3 as then, 2 different (status 1, tokens 1); the tokens of 4 could be compared." in last
    assert any(line.startswith("line 1, ") and "tokens from token 3 of 12 on" in line for line in told)
    assert any(line.startswith("line 2, ") and "status 200 then, 400 (max_new_tokens" in line for line in told)
