"""`jaxserve bench trace` on traces whose times can be added up by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench.trace import TraceFileError, lines, read_trace, summarize
from jaxserve.cli.main import run

HOST, OTHER, COMPUTE = (1, 1), (1, 2), (1, 3)


def span(thread: tuple[int, int], name: str, begin: float, us: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": thread[0], "tid": thread[1], "name": name, "ts": begin, "dur": us, "args": args}


def thread(of: tuple[int, int], name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": of[0], "tid": of[1], "name": "thread_name", "args": {"name": name}}


def launch(begin: float, us: float, number: int, kind: str = "decode") -> dict[str, Any]:
    return span(HOST, f"launch {kind}", begin, us, step_num=str(number), rows="2", tokens="2")


# Two steps. The device works 100..400 and 600..900; between, the host processes, schedules and launches.
STEPS = [
    span(HOST, "schedule", 0, 40),  # before the first launch: not of the steps
    launch(50, 60, 7),
    span(HOST, "PjitFunction(run)", 60, 40),
    span(HOST, "wait", 120, 300),
    span(HOST, "process", 430, 60),
    span(HOST, "schedule", 490, 20),
    launch(510, 100, 8),
    span(HOST, "PjitFunction(run)", 520, 70),
    span(HOST, "PjitFunction(run)", 521, 60),
    span(HOST, "wait", 620, 330),
]
CPU_OPS = [
    span(COMPUTE, "ThunkExecutor::Execute", 100, 300),
    span(COMPUTE, "dot.1", 100, 250),
    span(COMPUTE, "dot.1", 600, 300),
    span(COMPUTE, "ThunkExecutor::Execute (wait for completion)", 400, 200),
    span(OTHER, "dot.1", 400, 200),
]


def file_of(folder: Path, events: list[dict[str, Any]], name: str = "vm.trace.json.gz") -> str:
    names = [thread(HOST, "python"), thread(OTHER, "other"), thread(COMPUTE, "tf_XLAEigen/1")]
    folder.mkdir(parents=True, exist_ok=True)
    data = json.dumps({"traceEvents": [*names, *events, {}]}).encode()
    (folder / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    return str(folder / name)


def test_where_the_time_went(tmp_path: Path) -> None:
    summary = summarize(read_trace(file_of(tmp_path, STEPS + CPU_OPS)))
    assert (summary.num_steps, summary.steps_of, summary.rows) == (2, {"decode": 2}, 2.0)
    assert summary.window_us == 900
    assert summary.step_us == (460, 460, 460)
    found = {stage.name: (stage.count, stage.total_us, stage.longest_us) for stage in summary.host}
    assert found == {
        "wait": (2, 630, 330), "launch decode": (2, 160, 100), "process": (1, 60, 60), "schedule": (1, 20, 20),
        "(between spans)": (0, 30, 0),
    }  # fmt: skip
    assert summary.busy == pytest.approx(600 / 900)
    assert [(op.name, op.count, op.total_us) for op in summary.ops] == [("dot.1", 2, 550)]
    longest = summary.gaps[0]
    assert (longest.begin_us, longest.us, longest.step) == (350, 200, 8)
    assert longest.host == (("launch decode", 90.0), ("process", 60.0), ("wait", 20.0), ("schedule", 20.0))
    assert longest.inside == (("PjitFunction(run)", 70.0),)
    assert [gap.us for gap in summary.gaps] == [200, 50, 50]


def test_of_an_accelerator_its_streams_count(tmp_path: Path) -> None:
    device = (9, 1)
    gpu = [
        {"ph": "M", "pid": 9, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        thread(device, "Stream #1(Compute)"),
        thread((9, 2), "XLA Modules"),
        thread((9, 3), "Steps"),
        span(device, "gemm", 100, 90),
        span(device, "gemm", 190, 90),
        span((9, 2), "jit_run", 100, 500),
        span((9, 3), "8", 50, 900),
    ]
    summary = summarize(read_trace(file_of(tmp_path, STEPS + CPU_OPS + gpu)))
    assert summary.busy == pytest.approx(180 / 900)
    assert [(op.name, op.count) for op in summary.ops] == [("gemm", 2)]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file_of(tmp_path / "a", STEPS, "older.trace.json")
    file = file_of(tmp_path / "a" / "b", STEPS + CPU_OPS)
    assert run(["bench", "trace", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.split("\n")[:-1] == list(lines(summarize(read_trace(file))))
    assert "2 steps (2 decode) in 0.900 ms" in text
    assert "0.200 ms at 0.350 ms, step 8: launch decode 0.090 ms" in text
    assert run(["bench", "trace", file, "--json", "--gaps", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["gaps"] == []


def test_one_step_and_no_device(tmp_path: Path) -> None:
    summary = summarize(read_trace(file_of(tmp_path, [launch(0, 10, 1)], "plain.trace.json")))
    assert (summary.step_us, summary.busy, summary.gaps[0].us) == ((0, 0, 0), 0, 10)
    assert "Longest gaps" in "\n".join(lines(summary))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"\x1f\x8bnonsense", "cannot be read"),
        (b"hello", "is no trace: it must be JSON with traceEvents"),
        (b'{"a": 1}', "is no trace"),
        (b'{"traceEvents": [{"ph": "X", "name": "dot", "ts": 0, "dur": 1}]}', "has no steps"),
        (b'{"traceEvents": [{"ph": "X", "name": "dot"}]}', "is no trace"),
        (b'{"traceEvents": [{"ph": "M", "name": "thread_name"}]}', "is no trace"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: bytes | None, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceFileError, match=message):
        read_trace(str(path))
    assert run(["bench", "trace", str(path)]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_without_one(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match=r"has no \*.trace.json.gz"):
        read_trace(str(tmp_path))
