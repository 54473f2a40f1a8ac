"""What pipelines bring: `python -m benchmarks.capacity_pipeline [--estimate] [MODEL ...]`.

Prints the section of docs/capacity.md about them. The largest steps of each stage are compiled at full depth by the compilers
of JAX 0.11.2 or newer (pip install 'jax[cuda13,tpu]'), minutes for each row on two cores, and must have the collectives they
should and one cache, in place. With `--estimate` nothing is compiled, and the table says so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.capacity_table import GIB, Compiles, Section, plan, taken
from benchmarks.model_configs import DEEPSEEK_V3, LLAMA_70B
from jaxserve.aot.capacity_plan import CapacityPlan, StepPlan
from jaxserve.aot.shard_collectives import expected_in_stage

REQUESTS = 256


class Case(NamedTuple):
    model: str
    raw: dict[str, Any]
    topology: str
    pp_size: int
    tp_size: int
    attn_dp_size: int = 1


CASES = (
    Case("Llama-3.1-70B", LLAMA_70B, "h200:8", 1, 8),
    Case("Llama-3.1-70B", LLAMA_70B, "h200:8", 2, 4),
    Case("Llama-3.1-70B", LLAMA_70B, "h200:8", 4, 2),
    Case("Llama-3.1-70B", LLAMA_70B, "h200:8", 8, 1),
    Case("DeepSeek-V3", DEEPSEEK_V3, "h200:2x8", 1, 16, 16),
    Case("DeepSeek-V3", DEEPSEEK_V3, "h200:2x8", 2, 8, 8),
)

HEADER = """## Pipelines

The same devices with the model's layers in one piece and in stages (`--pp-size`, [pipelines.md](pipelines.md)), in bfloat16.
All predicted, at the peaks of the data sheets: nothing was run, and launches, latencies of links and collectives, and what
kernels lose come on top.

{compiled}

* **weights** and **KV cache** are GiB of each device of the stage that decides how much all cache; **decides** are its layers.
* **1 request**: milliseconds of a decode step through all stages, each of which waits for the one before. (With attention by
  data parallelism one request for each group.)
* **256 requests**: milliseconds from one step to the next in a full pipeline, which has as many steps under way as stages, each
  with its part of the requests: what the slowest stage takes, or the way through all of them over their number. 4096 tokens
  each. **tokens/s** follows from it.
* **prefill**: thousands of prompt tokens per second in steps of 8192 tokens, one behind the other.
* **sent, decode** and **prefill**: MB for each token that a device sends to others, of the stage that sends most: in its
  collectives, and what it hands on to the next stage.
* Between the two hosts of DeepSeek-V3 each GPU has a network card of 400 Gb/s, within a host NVLink.
"""
COMPILED = """The largest prefill step (8192 tokens), the largest decode step (256 requests) and the largest sampling program
were compiled for each stage at full depth for exactly that cache, on {date} with {versions}; each has the collectives it should
([`shard_collectives.py`](../jaxserve/aot/shard_collectives.py)), none between stages, and the cache is updated in place.
**step** is the most that one of them takes beside weights and cache, GiB. `python -m benchmarks.capacity_pipeline` made the
table."""
ESTIMATED = """From shapes: nothing was compiled for this table, so that what steps take beside weights and cache is not known
(`python -m benchmarks.capacity_pipeline --estimate`, {date}); stages of a few layers of both models are, in
`tests/accelerator/test_pipeline.py`, where the collectives are looked at."""
TITLES = (
    "model | topology | PP | TP | groups | weights | KV cache | decides | KV tokens | step | 1 request | 256 requests | "
    "tokens/s | prefill | sent, decode | sent, prefill"
)


def check(case: Case, found: CapacityPlan) -> None:
    for step in found.steps:
        for stage, program in zip(found.stages, step.programs, strict=bool(step.programs)):
            where = case.model, case.pp_size, step.bucket.name
            config = stage.config.replace(attn_dp_size=case.attn_dp_size)
            expected = dict(expected_in_stage(config, case.tp_size, packs_tokens=step.bucket.packs_tokens))
            assert program.collectives == expected, (where, program.collectives)
            assert program.aliased_bytes >= stage.memory.kv_pool > program.temp_bytes, where
            assert program.pool_copies == 0, where


def row(case: Case, *, compiles: Compiles) -> str:
    # Each step of a full pipeline has a part of the requests.
    rows = sorted({case.attn_dp_size, REQUESTS // case.pp_size, REQUESTS})
    sizes = {"pp_size": case.pp_size, "tp_size": case.tp_size, "attn_dp_size": case.attn_dp_size}
    found = plan(case.raw, case.topology, compiles, **sizes, decode_row_buckets=tuple(rows))
    check(case, found)
    assert found.memory is not None
    memory, layers = found.memory, found.stages[found.decides].config.own_layers
    decode = [step for step in found.steps if step.bucket.decode_only]
    one, full = decode[0], next(step for step in decode if step.bucket.total_rows == REQUESTS // case.pp_size)
    prompts = [step for step in found.steps if not step.bucket.decode_only and not step.bucket.packs_tokens][-1]
    context = "" if full.shape.context_len == 4096 else f" (of {full.shape.context_len} tokens)"
    cells = (
        case.model, case.topology, case.pp_size, case.tp_size, case.attn_dp_size, f"{memory.weights / GIB:.2f}",
        f"{memory.kv_pool / GIB:.2f}", f"{layers[0]}-{layers[-1]}", f"{found.kv_tokens:,}",
        "-" if compiles == "none" else f"{max(map(taken, found.steps)) / GIB:.2f}",
        f"{one.prediction.latency_s * 1e3:.2f}", f"{full.prediction.interval_s * 1e3:.2f} {full.prediction.bound}{context}",
        f"{full.tokens_per_s:,.0f}", f"{prompts.tokens_per_s / 1e3:.1f}",
        f"{sent(case, full) / 1e6:.2f}", f"{sent(case, prompts) / 1e6:.2f}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def sent(case: Case, step: StepPlan) -> float:
    """Bytes for each token, of a device of the stage that sends most."""
    others = (case.tp_size - 1) / case.tp_size
    works = [part.work for part in step.parts]
    most = max(others * (2 * work.all_reduce_bytes + work.all_gather_bytes) + work.handed_on_bytes for work in works)
    return most / step.shape.all_tokens


SECTION = Section(HEADER, COMPILED, ESTIMATED, TITLES, CASES, row)

if __name__ == "__main__":
    SECTION.main(__doc__)
