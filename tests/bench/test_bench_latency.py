"""`bench latency`, `scheduler` and `startup`: on small models, beside a roofline by hand, and what is asked wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import pytest

from jaxserve.aot.chips import CHIPS
from jaxserve.aot.roofline import ModelShard, StepShape, step_work
from jaxserve.bench import roofline, startup
from jaxserve.bench.latency import Case, Timed
from jaxserve.bench.record import read_records
from jaxserve.bench.roofline import Roofline
from jaxserve.bench.steps import prefill_steps
from jaxserve.cli.main import run
from jaxserve.executor import build
from jaxserve.models import ModelConfig, divide_layers

SMALL = ["--max-running-requests", "2", "--chunked-prefill-size", "16", "--prefill-token-buckets", "16",
         "--decode-row-buckets", "2", "--max-total-tokens", "256"]  # fmt: skip


def test_a_batch_by_hand() -> None:
    """Rounds of 1 and 3 seconds; of the steps the first of each round does not count."""
    timed = Timed(Case(2, 10, 4), (1.0, 3.0), ((9.0, 0.5, 0.5), (9.0, 0.5, 1.5)), None, None)
    record = timed.record()
    assert (record["prefill_latency"], record["prefill_throughput"]) == (2.0, 10.0)
    assert (record["median_decode_latency"], record["median_decode_throughput"]) == (0.5, 4.0)
    assert (record["total_latency"], record["overall_throughput"]) == (12.5, 28 / 12.5)


def test_the_least_time_of_a_prompt(checkpoint: Callable[[str], Path]) -> None:
    """In one step: what its rows need together, and the weights once."""
    shard = ModelShard(ModelConfig.from_pretrained(str(checkpoint("qwen3"))), "bfloat16", 1, 64)
    chip = dataclasses.replace(CHIPS["v6e"], hbm_bytes_per_s=1.0, bf16_flops_per_s=1e30)
    least = Roofline(chip, (shard,), "").prefill(prefill_steps([8, 8], 16, 1))
    assert least.bound == "memory"
    assert least.step_s == step_work(shard, StepShape(2, 8, 8)).memory_bytes
    twice = Roofline(chip, (shard,), "").prefill(prefill_steps([8, 8], 8, 1))
    assert twice.step_s == 2 * step_work(shard, StepShape(1, 8, 8)).memory_bytes


def test_the_least_time_in_a_pipeline(checkpoint: Callable[[str], Path]) -> None:
    """A decode step goes through all stages; of several prefill steps most wait for the slowest one."""
    config = ModelConfig.from_pretrained(str(checkpoint("qwen3")))
    stages = [config.replace(stage=stage) for stage in divide_layers(config.num_layers, 2)]
    shards = tuple(ModelShard(stage, "bfloat16", 1, 64) for stage in stages)
    chip = dataclasses.replace(CHIPS["v6e"], hbm_bytes_per_s=1.0, bf16_flops_per_s=1e30)
    pipeline = Roofline(chip, shards, "")
    decode = [step_work(shard, StepShape(2, 1, 8)).memory_bytes for shard in shards]
    assert pipeline.decode(2, 8).step_s == sum(decode)
    prefill = [step_work(shard, StepShape(1, 8, 8)).memory_bytes for shard in shards]
    assert pipeline.prefill(prefill_steps([8, 8, 8], 8, 1)).step_s == sum(prefill) + 2 * max(prefill)


def test_a_device_without_peaks(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        device_kind, platform = "Some GPU", "gpu"

    shard = ModelShard(ModelConfig.from_pretrained(str(checkpoint("qwen3"))), "float32", 1, 64)
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert Roofline.here([shard]) is None


def test_latency(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline, "_TRIES_S", 0.01)
    out, traces = tmp_path / "latency.jsonl", tmp_path / "traces"
    line = ["bench", "latency", str(checkpoint("qwen3")), "--batch-size", "1,2", "--input-len", "20", "--output-len", "4"]
    line += ["--rounds", "2", "--output-file", str(out), "--profile", "--profile-output-dir", str(traces), *SMALL]
    assert run([*line, "--compilation-cache-dir", str(tmp_path / "cache")]) == 0
    printed = capsys.readouterr().out
    assert "this CPU, measured" in printed and ("memory" in printed or "compute" in printed)
    one, two = read_records(out)
    assert [record["batch_size"] for record in (one, two)] == [1, 2]
    assert [len(steps) for steps in two["decode_latencies"]] == [3, 3] and two["decode_roofline"]["latency"] > 0
    assert list(traces.rglob("*.xplane.pb"))


def test_latency_of_a_pipeline(checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_TRIES_S", 0.01)
    monkeypatch.setattr(build, "select_devices", lambda device, num_devices: None)  # this process has its eight
    out = tmp_path / "latency.jsonl"
    line = ["bench", "latency", str(checkpoint("qwen3")), "--pp-size", "2", "--batch-size", "2", "--input-len", "20"]
    line += ["--output-len", "3", "--rounds", "1", "--output-file", str(out), *SMALL]
    assert run([*line, "--compilation-cache-dir", str(tmp_path / "cache")]) == 0
    (record,) = read_records(out)
    assert record["decode_roofline"]["latency"] > 0 and record["median_decode_latency"] > 0


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--batch-size", "3"], 1, "--batch-size 3 needs --max-running-requests 3; it is 2."),
        (["--input-len", "100000"], 1, "need 100016 tokens; the context has"),
        (["--output-len", "1"], 2, "1 is less than 2"),
        (["--batch-size", "0"], 2, "0 is less than 1"),
        (["--output-file", "/nowhere/at/all"], 1, "/nowhere/at/all: No such file"),
    ],
)
def test_latency_asked_wrongly(
    options: list[str], code: int, words: str, checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "latency", str(checkpoint("qwen3")), *options, *SMALL]) == code
    assert words in capsys.readouterr().err


def test_scheduler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scheduler.jsonl"
    assert run(["bench", "scheduler", "--running", "4", "--steps", "20", "--page-size", "4", "--output-file", str(out)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    first, second = read_records(out)
    assert (first["stream"], second["stream"], first["num_running"]) == (True, False, 4)
    assert 0 < first["schedule_us"] <= first["total_us"] <= first["p99_total_us"]
    assert run(["bench", "scheduler", "--page-size", "0"]) == 2


def test_startup(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With starts that take what is said here: one with an empty cache, then those that count."""
    told: list[Sequence[str]] = []

    def start(cache: str, options: Sequence[str]) -> startup.Start:
        told.append(options)
        return startup.Start((9.0, 2.0, 4.0, 3.0)[len(told) - 1], 5.0, 6.0, 1, {"imports": 1.0})

    monkeypatch.setattr(startup, "start", start)
    out = tmp_path / "startup.jsonl"
    assert run(["bench", "startup", "demo", "--output-file", str(out), "--page-size", "8"]) == 0
    assert told == [["--model-path", "demo", "--page-size", "8"]] * 4
    assert "warm, medians: ready 3.0 s, first answer 5.0 s, fully warm 6.0 s" in capsys.readouterr().out
    assert [(record["cache"], record["ready_s"]) for record in read_records(out)][:2] == [("cold", 9.0), ("warm", 2.0)]


def test_a_server_that_does_not_start(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "startup", "demo", "--no-such-option"]) == 1
    error = capfd.readouterr().err
    assert "No such option '--no-such-option'" in error and "the server ended with status 2 before it was ready" in error
