"""The request log's levels and forms, and what dumps keep."""

from __future__ import annotations

import json
import logging
import shutil
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.config import ServerArgs
from jaxserve.server.journal import dumps
from jaxserve.server.journal.journal import Journal
from jaxserve.server.requests import GenerateReqInput, GenerationChunk, PromptEmbeds, PromptOptions
from jaxserve.types import FinishReason, SamplingParams

LONG = "x" * 3000


class Sink:
    def push(self, chunk: GenerationChunk) -> None:
        chunk.text = "merged into something else"  # as sinks may

    def end(self) -> None: ...


def serve(journal: Journal, *, prompt: str | list[int] = LONG, rid: str = "r", finish: bool = True, n: int = 1) -> None:
    """A request from its coming to its end, or until its client leaves."""
    params = [SamplingParams(stop=["s"], n=n)]
    options = [PromptOptions(priority=3)]
    if isinstance(prompt, str):
        req = GenerateReqInput(prompts=[prompt], sampling_params=params, options=options)
    else:
        req = GenerateReqInput(input_ids=[prompt], sampling_params=params, options=options)
    sink = journal.open(req, [f"{rid}{j}" if n > 1 else rid for j in range(n)], 1.0, Sink())
    req.prompt_ids = [np.zeros(7, np.int32)]
    journal.accepted(sink)
    for index in range(n):
        sink.push(GenerationChunk(index, rid, "new ", [1], [], 7, 1, 0))
        if finish:
            sink.push(GenerationChunk(index, rid, LONG, [2], [], 7, 2, 0, FinishReason.length_limit(2), {"e2e_latency": 0.5}))
    journal.close_request(sink)


def logged(caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        journal = Journal(ServerArgs(log_requests=True, **options), lambda ids: f"text of {ids}")
        serve(journal)
    return caplog.messages


def test_the_levels_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    accepted, ended = logged(caplog, log_requests_level=0)
    assert accepted == "Request accepted: rid='r', num_prompts=1, prompt_tokens=7, stream=False, priority=3"
    assert ended.startswith("Request ended: rid='r', finish_reason={'type': 'length', 'length': 2}, prompt_tokens=7, compl")
    assert "xxx" not in accepted + ended
    accepted, ended = logged(caplog, log_requests_level=1)
    assert accepted.endswith("sampling_params=[{'stop': ['s']}]")
    assert "xxx" not in accepted + ended
    accepted, ended = logged(caplog)
    assert f"text=['{LONG[:1024]} ... {LONG[-1024:]}']" in accepted
    assert f"text='new {LONG[:1020]} ... {LONG[-1024:]}'" in ended
    accepted, ended = logged(caplog, log_requests_level=3)
    assert f"text=['{LONG}']" in accepted
    assert f"text='new {LONG}', output_ids=[1, 2]" in ended


def test_embeddings_are_told_by_their_size(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        journal = Journal(ServerArgs(log_requests=True, log_requests_level=3), str)
        embeds = [PromptEmbeds(np.full((count, 2), 0.125, np.float32), "key") for count in (3, 1)]
        req = GenerateReqInput(input_embeds=embeds, sampling_params=[SamplingParams()] * 2)
        sink = journal.open(req, ["a", "b"], 1.0, Sink())
        embeds[0].values = None  # sent
        journal.accepted(sink)
    assert "text=['3 x 2 numbers', '1 x 2 numbers']" in caplog.messages[0] and "0.125" not in caplog.text


def test_json_lines_and_prompts_of_ids(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        journal = Journal(ServerArgs(log_requests=True, log_requests_format="json"), lambda ids: f"\u2028{ids}")
        serve(journal, prompt=[4, 5], rid="a\nb", n=2)
    accepted, *ended = map(json.loads, caplog.messages)
    assert (accepted["event"], accepted["rid"]) == ("request.received", ["a\nb0", "a\nb1"])
    assert accepted["obj"]["text"] == ["\u2028[4, 5]"]
    assert [one["rid"] for one in ended] == ["a\nb0", "a\nb1"]
    assert "\u2028" not in "".join(caplog.messages) and "\n" not in "".join(caplog.messages)


def test_a_client_that_leaves_ends_its_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        journal = Journal(ServerArgs(log_requests=True), str)
        serve(journal, finish=False)
    (ended,) = caplog.messages[1:]
    assert "'message': 'Its client left.'}, completion_tokens=1" in ended
    assert not journal._open


def test_nothing_is_kept_when_nobody_asks() -> None:
    journal, sink = Journal(ServerArgs(), str), Sink()
    req = GenerateReqInput(prompts=["a"], sampling_params=[SamplingParams()])
    assert journal.open(req, ["r"], 0.0, sink) is sink
    health = GenerateReqInput(prompts=["a"], sampling_params=[SamplingParams()], is_health_check=True)
    assert Journal(ServerArgs(log_requests=True), str).open(health, ["r"], 0.0, sink) is sink


def test_recent_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(dumps, "time", types.SimpleNamespace(time=lambda: now_s))
    recent = dumps.RecentRequests()

    def entry(size: int, *, schema: int = 0) -> dict[str, Any]:
        params = {"json_schema": "x" * schema}
        request = {"text": "x" * size, "sampling_params": params}
        return {"ended_s": now_s, "request": request, "reply": {"text": "", "output_ids": [1]}}

    for _ in range(3):
        recent.add(entry(dumps._KEPT_SIZE // 2 - 1000))
    assert len(list(recent)) == 2
    for _ in range(3):
        recent.add(entry(0, schema=dumps._KEPT_SIZE // 2 - 1000))
    assert len(list(recent)) == 2
    now_s += 299
    recent.add(entry(0))
    assert len(list(recent)) == 3
    now_s += 2
    recent.add(entry(0))
    assert len(list(recent)) == 2


def test_a_full_disk_gets_no_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(ServerArgs(crash_dump_folder=str(tmp_path)), str)
    serve(journal)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    journal.dump_for_crash("why")
    assert "is not written: less than 1 GiB is free there." in caplog.text
    assert not list(tmp_path.rglob("*.jsonl"))
    monkeypatch.undo()
    journal.dump_for_crash("why")
    (path,) = tmp_path.rglob("*.jsonl")
    assert path.stat().st_mode & 0o077 == 0
    head, entry = [json.loads(line) for line in path.read_text().splitlines()]
    assert (head["reason"], entry["request"]["text"], entry["reply"]["text"]) == ("why", LONG, f"new {LONG}")


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file' cannot be written to: File exists"):
        Journal(ServerArgs(log_requests=True, log_requests_target=(str(tmp_path / "file"),)), str)
