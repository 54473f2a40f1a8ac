"""What pipelines bring: `python -m benchmarks.capacity_pipeline [--estimate] [MODEL ...]`.

Prints the section of docs/capacity.md about them. The largest steps of each stage are compiled at full depth by the compilers of
JAX 0.11.2 or newer (pip install 'jax[cuda13,tpu]'), minutes for each row on two cores, and must have the collectives they should
and one cache, in place. With `--estimate` nothing is compiled, and the table says so.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.capacity_large import GIB, taken
from benchmarks.model_configs import DEEPSEEK_V3, LLAMA_70B, write_config
from jaxserve.aot.capacity_plan import CapacityPlan, PlanOptions, StepPlan
from jaxserve.aot.planner import plan_capacity
from jaxserve.aot.report import compiler_versions
from jaxserve.aot.shard_collectives import expected_in_stage
from jaxserve.aot.targets import parse_target
from jaxserve.config import ServerArgs
from jaxserve.models import ModelConfig

REQUESTS = 256


class Case(NamedTuple):
    model: str
    raw: dict[str, Any]
    topology: str
    pp_size: int
    tp_size: int
    attn_dp_size: int = 1
    options: dict[str, Any] = {}  # noqa: RUF012 - never written to


CASES = (
    Case("Llama-3.1-70B", LLAMA_70B, "h200:8", 1, 8),
    Case("Llama-3.1-70B", LLAMA_70B, "h200:8", 2, 4),
    Case("Llama-3.1-70B", LLAMA_70B, "h200:8", 4, 2),
    Case("Llama-3.1-70B", LLAMA_70B, "h200:8", 8, 1),
    Case("DeepSeek-V3", DEEPSEEK_V3, "h200:2x8", 1, 16, 16),
    Case("DeepSeek-V3", DEEPSEEK_V3, "h200:2x8", 2, 8, 8),
)

HEADER = """## Pipelines

The same devices with the model's layers in one piece and in stages (`--pp-size`), in bfloat16. All predicted, at the peaks of the
data sheets: nothing was run, and launches, latencies of links and collectives, and what kernels lose come on top.

{compiled}

* **weights** and **KV cache** are GiB of each device of the stage that decides how much all cache; it is named in **decides**
  (its layers).
* **1 request**: milliseconds of a decode step through all stages, each of which waits for the one before. **256 requests**:
  milliseconds from one step to the next in a full pipeline, which has as many steps under way as stages, each with a part of the
  requests; so much the slowest stage takes, or the way through all of them over their number. 4096 tokens each.
  **tokens/s** follows from it.
* **prefill**: thousands of prompt tokens per second, steps of 8192 tokens of eight prompts, one behind the other.
* **sent**: MB that a device sends to others for each token of 256 requests that decode, and for 1000 of a prompt: what its
  collectives send, and what it hands on to the next stage.
* Between the two hosts of DeepSeek-V3 each GPU has a network card of 400 Gb/s, within a host NVLink. `jaxserve serve` refuses
  `--pp-size` over several hosts today; whole experts on each device, attention by data parallelism.
"""
COMPILED = """The largest prefill step (8192 tokens), the largest decode step (256 requests) and the largest sampling program of each
stage were compiled at full depth for exactly that cache, on {date} with {versions}; each has the collectives it should
([`shard_collectives.py`](../jaxserve/aot/shard_collectives.py)), none between stages, and the cache is updated in place. **step**
is the most that one of them takes beside weights and cache, GiB. `python -m benchmarks.capacity_pipeline` made the table."""
ESTIMATED = """From shapes: nothing was compiled for this table, so that what steps take beside weights and cache is not known
(`python -m benchmarks.capacity_pipeline --estimate`, {date}); stages of a few layers of both models are, in
`tests/accelerator/test_pipeline.py`, where the collectives are looked at."""


def plan(case: Case, compiles: Literal["none", "largest"]) -> CapacityPlan:
    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig.from_pretrained(write_config(Path(folder), case.raw))
        sizes = {"pp_size": case.pp_size, "tp_size": case.tp_size, "attn_dp_size": case.attn_dp_size}
        # Each step of a full pipeline has a part of the requests.
        rows = (*((case.attn_dp_size,) if case.attn_dp_size > 1 else (1,)), REQUESTS // case.pp_size, REQUESTS)
        args = ServerArgs(model_path=folder, **sizes, decode_row_buckets=tuple(sorted(set(rows))), **case.options)
        return plan_capacity(args, config, parse_target(case.topology), PlanOptions(compile=compiles, show_progress=False))


def check(case: Case, found: CapacityPlan) -> None:
    for step in found.steps:
        for stage, program in zip(found.stages, step.programs, strict=bool(step.programs)):
            where = case.model, case.pp_size, step.bucket.name
            config = stage.config.replace(attn_dp_size=case.attn_dp_size)
            expected = dict(expected_in_stage(config, case.tp_size, packs_tokens=step.bucket.packs_tokens))
            assert program.collectives == expected, (where, program.collectives)
            assert program.aliased_bytes >= stage.memory.kv_pool > program.temp_bytes, where
            assert program.pool_copies == 0, where


def row(case: Case, *, compiles: Literal["none", "largest"]) -> str:
    found = plan(case, compiles)
    assert found.failure is None and found.memory is not None, found.failure
    check(case, found)
    memory, layers = found.memory, found.stages[found.decides].config.own_layers
    decode = [step for step in found.steps if step.bucket.decode_only]
    one, full = decode[0], next(step for step in decode if step.bucket.total_rows * case.pp_size >= REQUESTS)
    prompts = next(step for step in reversed(found.steps) if not step.bucket.decode_only and is_balanced(step))
    context = "" if full.shape.context_len == 4096 else f" (of {full.shape.context_len} tokens)"
    cells = (
        case.model, case.topology, case.pp_size, case.tp_size, case.attn_dp_size, f"{memory.weights / GIB:.2f}",
        f"{memory.kv_pool / GIB:.2f}", f"{layers[0]}-{layers[-1]}", f"{found.kv_tokens:,}",
        "-" if compiles == "none" else f"{max(map(taken, found.steps)) / GIB:.2f}",
        f"{one.prediction.latency_s * 1e3:.2f}", f"{full.prediction.interval_s * 1e3:.2f} {full.prediction.bound}{context}",
        f"{full.tokens_per_s:,.0f}", f"{prompts.tokens_per_s / 1e3:.1f}", f"{sent(full):.2f}, {1000 * sent(prompts):.0f}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


