"""What context parallelism brings: `python -m benchmarks.capacity_context [--estimate] [MODEL ...]`.

Prints the section of docs/capacity.md about it. The largest steps are compiled at full depth by the compilers of JAX 0.11.2 or
newer (pip install 'jax[cuda13,tpu]'), some minutes for each row on two cores, and must have the collectives they should and one
cache, in place. With `--estimate` nothing is compiled, and the table says so.
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

from benchmarks.capacity_attention import most_taken
from benchmarks.capacity_table import GIB, Compiles, Section, plan
from benchmarks.model_configs import DEEPSEEK_V2_LITE, DEEPSEEK_V3
from jaxserve.aot.capacity_plan import CapacityPlan
from jaxserve.aot.hlo import expected_collectives
from jaxserve.aot.shard_collectives import expected_of_context

TP_SIZE = 8
CONTEXT_LEN = 131072


class Case(NamedTuple):
    model: str
    raw: dict[str, Any]
    topology: str
    dcp_size: int
    options: dict[str, Any] = {}  # noqa: RUF012 - never written to


INT8 = {"quantization": "int8wo"}
CASES = (
    Case("DeepSeek-V3, int8wo", DEEPSEEK_V3, "h200:8", 1, INT8),
    Case("DeepSeek-V3, int8wo", DEEPSEEK_V3, "h200:8", 8, INT8),
    Case("DeepSeek-V2-Lite", DEEPSEEK_V2_LITE, "v6e:2x4", 1),
    Case("DeepSeek-V2-Lite", DEEPSEEK_V2_LITE, "v6e:2x4", 8),
)

HEADER = """## Context parallelism

Latents of all tokens on each of 8 devices, and an eighth of them (`--dcp-size`,
[context_parallel.md](context_parallel.md)), for requests of {context_len} tokens; whole experts on each device (EP = TP), in
bfloat16 where nothing else is said.

{compiled}
"""
COMPILED = """The largest prefill step (8192 tokens), the largest decode step (256 requests) and the largest sampling program
were compiled at full depth for exactly that cache, on {date} with {versions};
each has the collectives it should ([`shard_collectives.py`](../jaxserve/aot/shard_collectives.py)), and the cache is updated
in place. **prefill** and **decode** are what they take beside weights and cache. `python -m benchmarks.capacity_context` made
the table."""
ESTIMATED = """From shapes: nothing was compiled for this table, so that what steps take beside weights and cache is not known
(`python -m benchmarks.capacity_context --estimate`, {date})."""
TITLES = "model | topology | TP | DCP | weights | KV cache | KV tokens | whole requests | prefill | decode"


def check(case: Case, found: CapacityPlan) -> None:
    assert found.memory is not None
    for step in found.steps:
        expected = collections.Counter(expected_collectives(found.config, TP_SIZE))
        if case.dcp_size > 1:
            expected.update(expected_of_context(found.config, expands=not step.bucket.decode_only))
        for program in step.programs:
            # TPUs gather few rows of logits by adding them up, each device's part in its place.
            added_up = expected + collections.Counter({"all-reduce": 1}) - collections.Counter({"all-gather": 1})
            allowed = (dict(expected), dict(added_up))
            assert program.collectives in allowed, (case.model, step.bucket.name, program.collectives)
            assert program.aliased_bytes >= found.memory.kv_pool > program.temp_bytes, (case.model, step.bucket.name)
            assert program.pool_copies == 0, (case.model, step.bucket.name)


def row(case: Case, *, compiles: Compiles) -> str:
    options = {"tp_size": TP_SIZE, "dcp_size": case.dcp_size, "context_length": CONTEXT_LEN, **case.options}
    found = plan(case.raw, case.topology, compiles, **options)
    check(case, found)
    assert found.memory is not None
    prefill, decode = ("-", "-") if compiles == "none" else (most_taken(found, is_decode) for is_decode in (False, True))
    memory = found.memory
    cells = (
        case.model, case.topology, TP_SIZE, case.dcp_size, f"{memory.weights / GIB:.2f}", f"{memory.kv_pool / GIB:.2f}",
        f"{found.kv_tokens:,}", found.kv_tokens // CONTEXT_LEN, prefill, decode,
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


SECTION = Section(HEADER.replace("{context_len}", f"{CONTEXT_LEN:,}"), COMPILED, ESTIMATED, TITLES, CASES, row)

if __name__ == "__main__":
    SECTION.main(__doc__)
