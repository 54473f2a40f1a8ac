"""A runner that serves with few programs while the others are compiled: same tokens, and nothing compiled in its process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxserve.commands import ReleaseMemory, ResumeMemory
from jaxserve.config import ServerArgs
from jaxserve.executor import ModelRunner, background, build_runner
from jaxserve.runner import PageUpdates, RowState, StepInput, launch
from jaxserve.types import ForwardMode, SamplingParams

NOTHING = np.zeros(0, np.int32)
PROMPT = [5, 6, 7, 8, 9]
ASKED = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5},
]


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def tokens(runner: ModelRunner, count: int = 4) -> list[list[int]]:
    """What each of ASKED generates alone, in row 0 and pages from 0 on."""
    return [_generate(runner, SamplingParams(**sampling), count) for sampling in ASKED]  # type: ignore[arg-type]


def _generate(runner: ModelRunner, sampling: SamplingParams, count: int) -> list[int]:
    state = RowState(0, sampling, 7, len(PROMPT), NOTHING, NOTHING, NOTHING)
    found: list[int] = []
    for at in range(count):
        length = len(PROMPT) + at
        page = (length - 1) // runner.spec.page_size
        opens = at == 0 or (length - 1) % runner.spec.page_size == 0
        step = StepInput(
            mode=ForwardMode.DECODE if at else ForwardMode.EXTEND,
            rows=ints(0),
            seq_lens=ints(length),
            extend_lens=ints(1 if at else length),
            num_decode_rows=1 if at else 0,
            input_ids=NOTHING if at else ints(*PROMPT),
            sample=np.asarray([True]),
            page_updates=PageUpdates.of(ints(0), ints(page), ints(page)) if opens else PageUpdates.of(*[NOTHING] * 3),
            new_rows=[] if at else [state],
            needs_sampling=not sampling.is_greedy,
            needs_adjusting=sampling.has_penalties,
            needs_logprobs=False,
            needs_top_logprobs=False,
        )
        found.append(int(runner.fetch(launch(runner, step)).token_ids[0, 0]))
    return found


def options(model: Path, cache: Path) -> ServerArgs:
    return ServerArgs(
        model_path=str(model),
        max_total_tokens=256,
        max_running_requests=4,
        context_length=64,
        chunked_prefill_size=32,
        prefill_token_buckets=(8, 32),
        decode_row_buckets=(1, 4),
        grammar_backend="none",
        compilation_cache_dir=str(cache),
    )


def wait_until_warm(runner: ModelRunner, timeout_s: float = 240) -> None:
    deadline_s = time.monotonic() + timeout_s
    while runner.tend():
        assert time.monotonic() < deadline_s, runner.internal_state()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


def test_no_token_differs_before_and_after(model: Path, tmp_path: Path) -> None:
    """Cold: the rest is compiled by a process, whose work is found again by the next start."""
    args = options(model, tmp_path)
    runner = build_runner(args, warmup="early", show_progress=False).runner
    compiled = runner.internal_state()["compiles_total"]
    missing = runner.num_programs_missing
    assert missing > 0
    smallest = runner._program_set.buckets.extend[0]
    assert smallest not in runner._buckets.extend
    before = tokens(runner)
    assert runner.internal_state()["steps_in_larger_program_total"] > 0
    wait_until_warm(runner)
    state = runner.internal_state()
    assert (state["programs_missing"], state["fully_warm"], state["compiles_after_ready_total"]) == (0, True, 0)
    assert state["compiles_total"] == compiled, "another process compiled"
    assert tokens(runner) == before
    assert runner.internal_state()["steps_in_larger_program_total"] == state["steps_in_larger_program_total"]

    early = build_runner(args, warmup="early", show_progress=False).runner
    assert early.num_programs_missing > 0
    assert smallest in early._buckets.extend, "what is cached for the first request, a start has at once"
    again = build_runner(args, show_progress=False).runner
    assert again.num_programs_missing == 0
    assert again.internal_state()["compiles_total"] == 0
    assert tokens(again) == before


def test_if_the_process_fails_the_server_compiles(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background.sys, "executable", "/bin/false")
    runner = build_runner(options(model, tmp_path), warmup="early", show_progress=False).runner
    before = tokens(runner)
    wait_until_warm(runner)
    assert "ended with exit status 1" in caplog.text
    assert runner.internal_state()["compiles_after_ready_total"] == 0
    assert tokens(runner) == before


def test_programs_wait_while_memory_is_released(model: Path, tmp_path: Path) -> None:
    """An accelerator runs each that arrives, with weights and pool."""
    runner = build_runner(options(model, tmp_path), warmup="early", show_progress=False).runner
    before = tokens(runner)
    missing = runner.num_programs_missing
    runner.execute(ReleaseMemory(("kv_cache",))).result()
    time.sleep(0.2)
    assert runner.tend() == missing
    runner.execute(ResumeMemory(("kv_cache",))).result()
    wait_until_warm(runner)
    assert tokens(runner) == before
