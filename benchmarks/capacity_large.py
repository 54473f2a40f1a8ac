"""The large models on the smallest topologies that hold them: `python -m benchmarks.capacity_large [MODEL ...]`.

Prints the section of docs/capacity.md about them. Their largest steps are compiled at full depth by the compilers of JAX 0.11.2
or newer (pip install 'jax[cuda13,tpu]'), one to five minutes for each row on two cores, and must have the collectives they
should and one cache, in place.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.capacity_table import GIB, compilers, plan, print_table, taken
from benchmarks.model_configs import (
    DEEPSEEK_V3,
    GLM_4_5,
    GPT_OSS_120B,
    QWEN3_235B_A22B,
    QWEN3_NEXT_80B_A3B,
)
from jaxserve.aot.capacity_plan import CapacityPlan
from jaxserve.aot.hlo import expected_collectives


class Case(NamedTuple):
    model: str
    raw: dict[str, Any]
    topology: str
    tp_size: int
    max_requests: int = 256


CASES = (
    Case("gpt-oss-120b", GPT_OSS_120B, "h200:2", 2),
    Case("gpt-oss-120b", GPT_OSS_120B, "h200:4", 4),
    Case("gpt-oss-120b", GPT_OSS_120B, "tpu7x:2x2x1", 8),
    Case("Qwen3-Next-80B-A3B", QWEN3_NEXT_80B_A3B, "h200:2", 2),
    Case("Qwen3-Next-80B-A3B", QWEN3_NEXT_80B_A3B, "v6e:2x4", 8, 128),
    Case("Qwen3-235B-A22B", QWEN3_235B_A22B, "h200:4", 4),
    Case("Qwen3-235B-A22B", QWEN3_235B_A22B, "h200:8", 8),
    Case("Qwen3-235B-A22B", QWEN3_235B_A22B, "tpu7x:2x2x1", 8),
    Case("GLM-4.5", GLM_4_5, "h200:8", 8),
    Case("GLM-4.5", GLM_4_5, "tpu7x:2x2x2", 16),
    Case("DeepSeek-V3", DEEPSEEK_V3, "tpu7x:2x2x2", 16),
    Case("DeepSeek-V3", DEEPSEEK_V3, "v6e:8x8", 64),
)

HEADER = """## Large models

The smallest topologies here that hold them, in bfloat16, also where the published checkpoint is in float8 or mxfp4; configs of
`benchmarks/model_configs.py`. The largest prefill step (8192 tokens), decode step (256 requests) and sampling program were
compiled at full depth for exactly that cache, on {date} with {versions}.
GiB of each device; **prefill** and **decode** are what these steps take beside weights and caches. Each has two all-reduces
per layer and one for the embedding, one all-gather of the logits (over 64 devices one more all-reduce in its place), and no
other collective; none copies the cache or states. **256 requests** and **tokens/s** as above: bounds of a decode step, nothing
was run. tpu7x:2x2x2 is two hosts ([hosts.md](hosts.md)), v6e:8x8 sixteen.
`python -m benchmarks.capacity_large` made the table.

Layers of Qwen3-Next keep states: 77 MB for each request ([models.md](models.md)), and by default there are three of them for
each of `--max-running-requests`, one that runs and two behind cached prefixes.
"""
TITLES = "model | topology | TP | weights | states | KV cache | KV tokens | prefill | decode | 256 requests | tokens/s"


def check(case: Case, found: CapacityPlan) -> None:
    """The compiled steps have the collectives they should, and one cache, in place."""
    assert found.memory is not None
    expected = dict(expected_collectives(found.config, case.tp_size))
    # Few rows of logits are gathered over many chips by adding them up, each chip's part in its place.
    added_up = {"all-reduce": sum(expected.values())}
    for step in found.steps:
        for program in step.programs:
            assert program.collectives in (expected, added_up), (case, program)
            assert program.aliased_bytes >= found.memory.kv_pool + found.memory.states, (case, program)
            assert program.pool_copies == 0, (case, program)


def row(case: Case) -> str:
    options = {"tp_size": case.tp_size, "max_running_requests": case.max_requests}
    found = plan(case.raw, case.topology, **options)
    check(case, found)
    assert found.memory is not None
    memory, most = found.memory, found.steps[-1]
    prefill, decode = (
        max(taken(step) for step in found.steps if step.bucket.decode_only == is_decode) for is_decode in (False, True)
    )
    states = f"{memory.states / GIB:.2f}" if memory.states else ""
    note = "" if case.max_requests == 256 else f" (of {case.max_requests} requests)"
    context = "" if most.shape.context_len == 4096 else f" (of {most.shape.context_len} tokens)"
    step_s = most.prediction.interval_s
    cells = (
        case.model, case.topology, case.tp_size, f"{memory.weights / GIB:.2f}", states + note, f"{memory.kv_pool / GIB:.2f}",
        f"{found.kv_tokens:,}", f"{prefill / GIB:.2f}", f"{decode / GIB:.2f}",
        f"{step_s * 1e3:.2f} {most.prediction.bound}{context}", f"{most.shape.num_rows / step_s:,.0f}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def print_section(cases: Sequence[Case]) -> None:
    print(HEADER.format(versions=compilers(), date=datetime.date.today().isoformat()))
    print_table(TITLES, row, cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="Only these.")
    wanted = parser.parse_args().models
    print_section([case for case in CASES if not wanted or case.model in wanted])


if __name__ == "__main__":
    main()
