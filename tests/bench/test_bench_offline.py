"""`bench offline` on an engine that answers by rule: what is counted, refused and cut short, and what is asked wrongly."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxserve.bench.offline import OfflineBench
from jaxserve.bench.serving.options import ServingOptions
from jaxserve.bench.serving.work import Task
from jaxserve.cli.main import run
from jaxserve.server.requests import RequestError


class StubEngine:
    """Answers every prompt with as many tokens as it may; refuses the word "bad", and waits forever for "slow"."""

    def __init__(self, on_slow: Callable[[], object] = lambda: None) -> None:
        self.calls: list[str] = []
        self._on_slow = on_slow

    async def async_generate(self, sampling_params: dict[str, Any], prompt: str) -> dict[str, Any]:
        if prompt == "bad":
            raise RequestError("This prompt is refused.")
        if prompt == "slow":
            asyncio.get_running_loop().call_later(0.05, self._on_slow)
            await asyncio.Event().wait()
        meta = {"prompt_tokens": 3, "completion_tokens": sampling_params["max_new_tokens"], "cached_tokens": 1}
        return {"text": "answer", "meta_info": meta}

    def generate(self, **fields: Any) -> None:
        self.calls.append(f"warm-up of {fields['sampling_params']['max_new_tokens']} tokens")

    def flush_cache(self) -> None:
        self.calls.append("flush")

    def start_profile(self, **fields: Any) -> None:
        self.calls.append(f"start {fields}")

    def stop_profile(self) -> None:
        self.calls.append("stop")

    def get_server_info(self) -> dict[str, Any]:
        return {"served_model_name": "stub", "internal_states": [{"last_gen_throughput": 7.0}]}


def bench(engine: StubEngine, prompts: list[str], **options: Any) -> OfflineBench:
    tasks = [Task(turns=[prompt], prompt_len=3, output_len=50) for prompt in prompts]
    return OfflineBench(engine, ServingOptions(**options), tasks)  # type: ignore[arg-type]


def test_what_is_counted() -> None:
    engine, answered = StubEngine(), list[int]()
    offline = bench(engine, ["one", "two", "bad"], output_details=True)
    offline.warm_up()
    record = offline.run(lambda: answered.append(1))
    assert engine.calls == ["warm-up of 32 tokens", "flush"] and len(answered) == 3
    assert (record["successful_requests"], record["failed"], record["interrupted"]) == (2, 1, False)
    assert (record["total_input_tokens"], record["total_output_tokens"], record["last_gen_throughput"]) == (6, 100, 7.0)
    assert record["failures"] == {"This prompt is refused.": {"count": 1, "message": "This prompt is refused."}}
    assert record["output_throughput"] == pytest.approx(100 / record["total_latency"])
    assert (record["output_lens"], record["errors"]) == ([50, 50, 0], ["", "", "This prompt is refused."])


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Also where the tests were started in a shell's background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_keeps_what_is_there() -> None:
    engine = StubEngine(on_slow=lambda: os.kill(os.getpid(), signal.SIGINT))
    record = bench(engine, ["one", "slow"]).run()
    assert (record["successful_requests"], record["interrupted"]) == (1, True)
    assert record["total_latency"] >= 0.05


def test_a_profile() -> None:
    engine = StubEngine()
    bench(engine, ["one"], profile=True, profile_output_dir="traces").run()
    assert engine.calls == ["flush", "start {'output_dir': 'traces'}", "stop"]
    engine.calls.clear()
    bench(engine, ["one"], profile=True, profile_num_steps=3).run()
    assert engine.calls == ["flush", "start {'num_steps': 3}"]  # it ends by itself


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dataset-name", "multi-turn"], "is for bench serving"),
        (["--dataset-name", "sharegpt"], "needs a file: --dataset-path"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--runs", "0"], "0 is not in the range"),
    ],
)
def test_asked_wrongly(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "offline", "demo", *options]) == 2
    assert words in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "offline", "demo", "--output-file", "/nowhere/at/all"]) == 1
    error = capsys.readouterr().err
    assert "/nowhere/at/all: No such file" in error and "Loading" not in error
