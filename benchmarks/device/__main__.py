"""Every kernel on the GPU at hand: is it right, how fast, how near to the device's limits, and against what else there is.

    PYTHONPATH=. python -m benchmarks.device --out device.json              # from the repository root, under 8 minutes
    PYTHONPATH=. python -m benchmarks.device --only ceilings decode --budget-s 120
    PYTHONPATH=. python -m benchmarks.device --smoke                        # on a CPU, kernels interpreted, seconds

Sections, in this order; --only takes their names:

    ceilings  copy and read bandwidth, a bf16 matrix product on random data, through JAX and torch
    checks    every kernel against float32 arithmetic on fresh random, poisoned inputs; each twice, for equal bits
    decode, extend, mla, write    our kernels with cold L2: microseconds, bytes and operations over them, share of the floor
    model     Llama-3.1-8B shapes with dummy weights through the executor: decode steps and prefill
    jax       the same shapes through cuDNN (jax.nn.dot_product_attention, dense KV) and JAX's deprecated Triton paged kernel
    torch     and through SDPA (flash, cuDNN; dense KV), FlexAttention with a paged block mask, FlashInfer where installed

How times are taken stands in jaxserve/bench/timing.py (JAX) and torch_timing.py (torch). The floor of a case is the larger of
bytes over the best measured bandwidth and operations over the best measured matrix product. A case that fails, hangs or cannot
run here is recorded with its reason, and the others go on; so is every case that the budget left out.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.device.case import SECTIONS
from benchmarks.device.report import finish, print_table, write_json
from benchmarks.device.supervisor import Budget, run_sections

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "torch", "triton", "flashinfer-python", "nvidia-cudnn-cu13")


def _command(*words: str) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _machine(smoke: bool, commit: str | None) -> dict[str, Any]:
    fields = ("name", "driver_version", "memory.total")
    gpu = None if smoke else _command("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    return {
        "device": dict(zip(fields, gpu.split("\n")[0].split(", "), strict=False)) if gpu else {"name": "cpu"},
        "versions": _versions(),
        "commit": commit or _command("git", "rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "smoke": smoke,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--budget-s", type=float, default=450.0, help="no case is started after so many seconds")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="what to record where git cannot tell")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU, kernels interpreted")
    options = parser.parse_args()
    started_s = time.time()
    sections = [section for section in SECTIONS if section in options.only]
    document = _machine(options.smoke, options.commit)
    with tempfile.TemporaryDirectory() as folder:
        found = run_sections(sections, Path(folder), Budget(started_s, options.budget_s), smoke=options.smoke)
    ceilings, results = finish(found)
    document |= {"wall_s": round(time.time() - started_s, 1), "ceilings": ceilings, "cases": results}
    print_table(ceilings, results)
    if options.out:
        write_json(options.out, document)
    print(f"{document['wall_s']:.0f} s")
    return 1 if any(result["status"] == "failed" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
