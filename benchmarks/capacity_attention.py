"""What attention by data parallelism brings: `python -m benchmarks.capacity_attention [--estimate] [MODEL ...]`.

Prints the section of docs/capacity.md about it. The largest steps are compiled at full depth by the compilers of JAX 0.11.2 or
newer (pip install 'jax[cuda13,tpu]'), one to five minutes for each row on two cores, and must have the collectives they should
and one cache, in place. With `--estimate` nothing is compiled, and the table says so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.capacity_table import GIB, Compiles, Section, plan, taken
from benchmarks.model_configs import DEEPSEEK_V3, QWEN3_235B_A22B
from jaxserve.aot.capacity_plan import CapacityPlan
from jaxserve.aot.hlo import expected_collectives
from jaxserve.aot.shard_collectives import expected_with_shards


class Case(NamedTuple):
    model: str
    raw: dict[str, Any]
    topology: str
    tp_size: int
    attn_dp_size: int
    options: dict[str, Any] = {}  # noqa: RUF012 - never written to


INT8 = {"quantization": "int8wo"}
CASES = (
    Case("DeepSeek-V3, int8wo", DEEPSEEK_V3, "h200:8", 8, 1, INT8),
    Case("DeepSeek-V3, int8wo", DEEPSEEK_V3, "h200:8", 8, 8, INT8),
    Case("DeepSeek-V3", DEEPSEEK_V3, "tpu7x:2x2x2", 16, 1),
    Case("DeepSeek-V3", DEEPSEEK_V3, "tpu7x:2x2x2", 16, 4),
    Case("Qwen3-235B-A22B", QWEN3_235B_A22B, "h200:8", 8, 1),
    Case("Qwen3-235B-A22B", QWEN3_235B_A22B, "h200:8", 8, 2),
)

HEADER = """## Attention by data parallelism

The same devices with one KV cache and with several (`--attn-dp-size`, [attention_dp.md](attention_dp.md)), whole experts on
each device (EP = TP), weights in bfloat16 where nothing else is said. A device of DeepSeek-V3 keeps the latents of all tokens,
or those of its own requests alone; two devices of Qwen3-235B keep the same KV head.

{compiled}
Columns as above; **tokens/s** are bounds of a decode step, nothing was run.
"""
COMPILED = """The largest prefill step (8192 tokens, of one shard), the largest decode step (256 requests, as many in each
shard) and the largest sampling program were compiled at full depth for exactly that cache, on {date} with {versions}; each has
the collectives it should ([`shard_collectives.py`](../jaxserve/aot/shard_collectives.py)), and the cache is updated in place.
`python -m benchmarks.capacity_attention` made the table."""
ESTIMATED = """From shapes: nothing was compiled for this table, so that what steps take beside weights and cache is not known
(`python -m benchmarks.capacity_attention --estimate`, {date}); four layers of DeepSeek-V3 are, in
`tests/accelerator/test_attn_dp.py`, where the collectives are looked at."""
TITLES = "model | topology | TP | groups | weights | KV cache | KV tokens | prefill | decode | 256 requests | tokens/s"


def check(case: Case, found: CapacityPlan) -> None:
    assert found.memory is not None
    config = found.config.replace(attn_dp_size=case.attn_dp_size)
    for step in found.steps:
        if case.attn_dp_size == 1:
            expected = dict(expected_collectives(config, case.tp_size))
        else:
            expected = dict(expected_with_shards(config, case.tp_size, packs_tokens=step.bucket.packs_tokens))
        # TPUs gather few rows of logits by adding them up, each device's part in its place.
        sums, gathers = expected.get("all-reduce", 0) + 1, expected["all-gather"] - 1
        added_up = {**expected, "all-reduce": sums, "all-gather": gathers}
        allowed = (expected, {name: count for name, count in added_up.items() if count})
        for program in step.programs:
            assert program.collectives in allowed, (case.model, step.bucket.name, program.collectives)
            assert program.aliased_bytes >= found.memory.kv_pool, (case.model, step.bucket.name)
            assert program.pool_copies == 0, (case.model, step.bucket.name)


def row(case: Case, *, compiles: Compiles) -> str:
    found = plan(case.raw, case.topology, compiles, tp_size=case.tp_size, attn_dp_size=case.attn_dp_size, **case.options)
    check(case, found)
    assert found.memory is not None
    prefill, decode = ("-", "-") if compiles == "none" else (most_taken(found, is_decode) for is_decode in (False, True))
    memory, most = found.memory, found.steps[-1]
    context = "" if most.shape.context_len == 4096 else f" (of {most.shape.context_len} tokens)"
    step_s = most.prediction.interval_s
    cells = (
        case.model, case.topology, case.tp_size, case.attn_dp_size, f"{memory.weights / GIB:.2f}",
        f"{memory.kv_pool / GIB:.2f}", f"{found.kv_tokens:,}", prefill, decode,
        f"{step_s * 1e3:.2f} {most.prediction.bound}{context}", f"{most.shape.all_tokens / step_s:,.0f}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def most_taken(found: CapacityPlan, is_decode: bool) -> str:
    """GiB, of one of the steps of a kind."""
    return f"{max(taken(step) for step in found.steps if step.bucket.decode_only == is_decode) / GIB:.2f}"


SECTION = Section(HEADER, COMPILED, ESTIMATED, TITLES, CASES, row)

if __name__ == "__main__":
    SECTION.main(__doc__)
