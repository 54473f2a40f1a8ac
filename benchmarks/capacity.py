"""Writes docs/capacity.md from `jaxserve compile`: `python -m benchmarks.capacity > docs/capacity.md`.

Compiles the largest steps of every case with the compilers of JAX 0.11.2 or newer (pip install 'jax[cuda13,tpu]'), for about a
minute each on two idle cores. `--results DIR` keeps each plan as JSON and continues where an earlier run stopped; with
`--estimate` cases that are not in it yet are planned from shapes, without compiling, and the table says so. Sections of other
modules follow: `capacity_windows`, `capacity_large`, `capacity_attention`, `capacity_context`,
`capacity_pipeline`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import capacity_attention, capacity_context, capacity_large, capacity_pipeline, capacity_windows
from benchmarks.model_configs import (
    GEMMA_3_27B,
    LLAMA_8B,
    LLAMA_70B,
    QWEN3_30B_A3B,
    QWEN3_32B,
    write_config,
)

MODELS = {
    "Llama-3.1-8B": LLAMA_8B,
    "Qwen3-32B": QWEN3_32B,
    "Llama-3.1-70B": LLAMA_70B,
    "Gemma-3-27B": GEMMA_3_27B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
}
# Topology and --tp-size.
TARGETS = (
    ("v5e:1x1", 1), ("v5e:2x2", 4), ("v5e:2x4", 8), ("v5e:4x4", 16),
    ("v6e:1x1", 1), ("v6e:2x2", 4), ("v6e:2x4", 8),
    ("tpu7x:1x1x1", 2), ("tpu7x:2x2x1", 8),
    ("h200:1", 1), ("h200:4", 4), ("h200:8", 8),
)  # fmt: skip
# Of the decode steps the table shows one request alone and the most there can be.
OPTIONS = ("--programs", "largest", "--assumed-context", "4096", "--decode-row-buckets", "1,256")

HEADER = """# Capacity

What fits where, and how fast a decode step could be at most, from config.json alone: planned by `jaxserve compile`, by the
target's own compilers on a machine without any accelerator. Nothing here was run or timed on the hardware.

`python -m benchmarks.capacity` made the table, with {versions}. Each row is one command:

    jaxserve compile MODEL --topology TOPOLOGY --tp-size TP {options}

* Weights and KV cache are bfloat16. **weights** and **KV cache** are GiB of each device, **KV tokens** all that the cache holds
  with `--mem-fraction-static 0.9` (in layers without a window), and **requests** how many of the model's full length it is.
  The largest prefill step (8192 tokens), the largest decode step (256 requests) and the largest sampling program were compiled
  at full depth with exactly that cache; **step** is the most that one of them takes beside it, in GiB ("not compiled":
  estimated from shapes).
* **1 request** and **256 requests**: milliseconds of a decode step at the roofline, each request 4096 tokens long or as long as
  the cache allows, and what bounds it. A step is no faster than its bytes over the memory's bandwidth, or its operations over
  the peak, plus what it sends over the links' bandwidth ([`jaxserve/aot/roofline.py`](../jaxserve/aot/roofline.py) says what is
  counted; peaks and their sources are in [`chips.py`](../jaxserve/aot/chips.py)). Launches, latencies of collectives and
  everything a kernel loses come on top. **tokens/s** follows from the step of 256 requests and is a bound likewise.
* A TPU7x chip is two devices; every other chip is one.
"""


def plan(folder: Path, model: str, topology: str, tp_size: int, options: tuple[str, ...]) -> dict[str, Any]:
    """The JSON of one `jaxserve compile`; kept in `folder` if it was compiled."""
    kept = folder / f"{model}_{topology.replace(':', '_')}_tp{tp_size}.json"
    if not kept.exists():
        config = write_config(folder / model, MODELS[model])
        line = [sys.executable, "-m", "jaxserve", "compile", str(config), "--topology", topology, "--tp-size", str(tp_size)]
        print(f"{model} on {topology}, TP {tp_size}", file=sys.stderr)
        done = subprocess.run([*line, *options, "--json"], stdout=subprocess.PIPE, text=True, check=False)
        if not done.stdout:
            raise SystemExit(f"{' '.join(line)} failed")
        if options != OPTIONS:
            estimate: dict[str, Any] = json.loads(done.stdout)
            return estimate
        kept.write_text(done.stdout)
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


def check(model: str, found: dict[str, Any]) -> None:
    """The compiled steps have the collectives they should, and one KV cache, in place."""
    tp_size, pool = found["options"]["tp_size"], found["memory_bytes"]["kv_pool"]
    num_layers = MODELS[model].get("text_config", MODELS[model])["num_hidden_layers"]
    expected = {"all-reduce": 2 * num_layers + 1, "all-gather": 1} if tp_size > 1 else {}
    for step in found["steps"]:
        program = step["compiled"]
        if program is not None:
            assert program["collectives"] == expected, (model, found["topology"], step["name"], program["collectives"])
            assert program["aliased_bytes"] >= pool and program["pool_copies"] == 0, (model, found["topology"], step["name"])


def row(model: str, topology: str, tp_size: int, found: dict[str, Any]) -> str:
    start = f"| {model} | {topology} | {tp_size} |"
    memory, kv = found["memory_bytes"], found["kv_cache"]
    if not found["fits"]:
        sentence = found["failure"].split(". The smallest")[0].split(": ")[-1]
        return f"{start} - | | | | | does not fit: {sentence} | | |"
    check(model, found)
    decode = [step for step in found["steps"] if step["decode_only"]]
    one, most = decode[0]["roofline"], decode[-1]["roofline"]
    rows, context = decode[-1]["assumed"]["num_rows"], decode[-1]["assumed"]["context_len"]
    largest = f"{memory['temporaries'] / 2**30:.2f}" if found["compile_s"]["sum_over_programs"] else "not compiled"
    note = "" if context == 4096 else f" (of {context} tokens)"
    return (
        f"{start} {memory['weights'] / 2**30:.2f} | {memory['kv_pool'] / 2**30:.2f} | {largest} | "
        f"{kv['tokens']:,} | {kv['requests_of_full_length']} | {one['step_s'] * 1e3:.2f} {one['bound']} | "
        f"{most['step_s'] * 1e3:.2f} {most['bound']}{note} | {rows / most['step_s']:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="Folder that keeps each plan as JSON.")
    parser.add_argument("--estimate", action="store_true", help="Do not compile; plan what is missing from shapes.")
    arguments = parser.parse_args()
    folder = arguments.results or Path(tempfile.mkdtemp())
    options = ("--programs", "none", *OPTIONS[2:]) if arguments.estimate else OPTIONS
    folder.mkdir(parents=True, exist_ok=True)
    plans = [
        (model, topology, tp, plan(folder, model, topology, tp, options))
        for model in MODELS
        for topology, tp in TARGETS
        if not (topology == "v5e:4x4" and model != "Llama-3.1-70B")  # where it is the smallest that will do
    ]
    versions = plans[0][-1]["versions"]
    tools = ", ".join(f"{name} {versions[name]}" for name in ("jax", "libtpu", "jax-cuda13-plugin") if name in versions)
    print(HEADER.format(options=" ".join(OPTIONS), versions=tools))
    print("| model | topology | TP | weights | KV cache | step | KV tokens | requests | 1 request | 256 requests | tokens/s |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for model in MODELS:
        for case in plans:
            if case[0] == model:
                print(row(*case))
    print()
    capacity_windows.main()
    print()
    capacity_large.print_section(capacity_large.CASES)
    for section in (capacity_attention.SECTION, capacity_context.SECTION, capacity_pipeline.SECTION):
        section.print()
        print()


if __name__ == "__main__":
    main()
