"""What pools of their own bring layers with a sliding window: `python -m benchmarks.capacity_windows`.

Prints the section of docs/capacity.md about it: how many requests of a length the KV cache holds, with one pool for all layers
and with a pool per window. From shapes alone, without compiling; jax[cuda13,tpu] must be installed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.model_configs import (
    GEMMA_3_1B,
    GEMMA_3_4B,
    GEMMA_3_12B,
    GEMMA_3_27B,
    QWEN3_30B_A3B,
    write_config,
)
from jaxserve.aot.capacity_plan import CapacityPlan, PlanOptions
from jaxserve.aot.planner import plan_capacity
from jaxserve.aot.targets import parse_target
from jaxserve.config import ServerArgs
from jaxserve.executor.pool_sizes import num_requests
from jaxserve.models import ModelConfig

MODELS = {
    "Gemma-3-1B": GEMMA_3_1B,
    "Gemma-3-4B": GEMMA_3_4B,
    "Gemma-3-12B": GEMMA_3_12B,
    "Gemma-3-27B": GEMMA_3_27B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
}
TOPOLOGIES = ("h200:1", "v6e:1x1")
LENGTHS = (1024, 8192, 32768, 131072)
RATIOS = (0.5, 0.1)  # the default, and one for long requests

HEADER = """## Sliding windows

Layers with a window keep only the last tokens of a sequence, in a pool of their own. The table says how many requests of a
length one device holds at once: with one pool for all layers / with `--swa-full-tokens-ratio 0.5`, the default / with 0.1. That
many tokens a pool of windows holds per token of the other layers' pool, so a small ratio is for long requests: short ones fill
both alike. "512+" is more than request rows can use; a model without windows has one pool whatever the ratio. From shapes
(`--programs none`), otherwise as above. `python -m benchmarks.capacity_windows` made the table.
"""


def plan(raw: dict[str, Any], topology: str, ratio: float) -> CapacityPlan:
    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig.from_pretrained(write_config(Path(folder), raw))
        args = ServerArgs(model_path=folder, swa_full_tokens_ratio=ratio)
        return plan_capacity(args, config, parse_target(topology), PlanOptions(compile="none", show_progress=False))


def row(name: str, raw: dict[str, Any], topology: str) -> str | None:
    """None where the weights do not fit."""
    plans = [plan(without_windows(raw), topology, RATIOS[0]), *(plan(raw, topology, ratio) for ratio in RATIOS)]
    if any(found.failure for found in plans):
        return None
    context_len = plans[0].args.context_length
    assert context_len is not None
    cells = [" / ".join(held(found, length) for found in plans) if length <= context_len else "-" for length in LENGTHS]
    return f"| {name} | {topology} | {' | '.join(cells)} |"


def held(found: CapacityPlan, length: int) -> str:
    page_size, max_rows = found.args.page_size, found.args.max_running_requests
    assert found.memory is not None and page_size is not None and max_rows is not None
    count = num_requests(found.memory.kv_groups, page_size, length)
    return f"{2 * max_rows}+" if count >= 2 * max_rows else str(count)


def without_windows(raw: dict[str, Any]) -> dict[str, Any]:
    """The same model, were all its layers to see everything: as with one pool."""
    if "text_config" in raw:
        return raw | {"text_config": without_windows(raw["text_config"])}
    return raw | {"sliding_window": None}


def main() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    print(HEADER)
    print("| model | topology | 1k tokens | 8k | 32k | 128k |")
    print("|---|---|--:|--:|--:|--:|")
    for topology in TOPOLOGIES:
        for name, raw in MODELS.items():
            found = row(name, raw, topology)
            if found is not None:
                print(found, flush=True)


if __name__ == "__main__":
    main()
