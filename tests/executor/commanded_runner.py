"""A real runner of a tiny model, commands that are given to it, and the tokens that tell its weights."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.commands import Command, CommandError, ReplaceWeights
from jaxserve.config import ServerArgs
from jaxserve.executor import ModelRunner, build_runner
from jaxserve.executor.weights import WeightLoader
from jaxserve.handover import Handover
from jaxserve.models import ModelConfig
from jaxserve.runner import PageUpdates, RowState, StepInput, launch
from jaxserve.types import ForwardMode, SamplingParams

PROMPTS = ([5, 6, 7, 8, 9], [40, 41, 42], list(range(60, 75)))
NUM_TOKENS = 6


def build_small(path: Path, cache: Path, handover: Handover | None = None, **options: Any) -> ModelRunner:
    args = ServerArgs(
        model_path=str(path), page_size=1, max_total_tokens=200, max_running_requests=2, context_length=100,
        chunked_prefill_size=16, decode_row_buckets=(2,), compilation_cache_dir=str(cache), **options,
    )  # fmt: skip
    return build_runner(args, show_progress=False, handover=handover).runner


def tokens_of(runner: ModelRunner) -> list[list[int]]:
    return [generate(runner, prompt) for prompt in PROMPTS]


def generate(runner: ModelRunner, prompt: list[int]) -> list[int]:
    """Greedy tokens of a prompt, alone in row 0 and the pool's first pages."""
    with compiling_nothing(runner):
        first = run(runner, prompt, 0, decode=False)
        return [first, *(run(runner, prompt, at, decode=True) for at in range(len(prompt), len(prompt) + NUM_TOKENS - 1))]


@contextlib.contextmanager
def compiling_nothing(runner: ModelRunner) -> Iterator[None]:
    before = runner.internal_state()["compiles_total"]
    yield
    assert runner.internal_state()["compiles_total"] == before


def run(runner: ModelRunner, prompt: list[int], start: int, *, decode: bool) -> int:
    nothing, count = np.zeros(0, np.int32), 1 if decode else len(prompt)
    positions = np.arange(start, start + count, dtype=np.int32)
    state = RowState(0, SamplingParams(temperature=0), 0, len(prompt), nothing, nothing, np.array(prompt, np.int32))
    step = StepInput(
        mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
        rows=np.zeros(1, np.int32),
        seq_lens=np.array([start + count], np.int32),
        extend_lens=np.array([count], np.int32),
        num_decode_rows=int(decode),
        input_ids=nothing if decode else np.array(prompt, np.int32),
        sample=np.array([True]),
        page_updates=PageUpdates.of(np.zeros(count, np.int32), positions, positions),
        new_rows=[] if decode else [state],
        needs_sampling=False,
        needs_adjusting=False,
        needs_logprobs=False,
        needs_top_logprobs=False,
    )
    return int(runner.fetch(launch(runner, step)).token_ids[0, 0])


def execute(runner: ModelRunner, command: Command) -> None:
    with compiling_nothing(runner):
        runner.execute(command).result(timeout=120)


def replace(runner: ModelRunner, path: Path, load_format: str = "auto") -> None:
    execute(runner, ReplaceWeights(str(path), load_format))


def refusal(runner: ModelRunner, command: Command) -> str:
    with pytest.raises(CommandError) as error:
        execute(runner, command)
    return str(error.value)


def loader_of(config: ModelConfig, mesh: Mesh, context_len: int | None = None) -> WeightLoader:
    return WeightLoader(
        config=config,
        context_len=context_len or config.context_len,
        stages=((None, mesh),),
        dtype=np.dtype(np.float32),
        model_override_args="{}",
    )


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())
