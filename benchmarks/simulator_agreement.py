"""How near `jaxserve bench simulate` comes to a server: the same prompts, answered by both.

    python -m benchmarks.simulator_agreement [--rounds 3] [--rate inf]

The server runs a Qwen3 of 129M parameters (`benchmarks.medium_model`) on this machine's CPU; what its steps take is measured
before by `jaxserve bench latency`, at the sizes that they are padded to. Prints what the server showed and what was simulated,
and their ratio, medians over rounds with other prompts, which come at the same times in both.

The "device" has cores of its own, all but the last, where everything else runs: clients, HTTP and the detokenizer. Where they
share (`--share-cores`), a step takes as long as the slower of its threads, which nobody simulates.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.medium_model import MEDIUM_QWEN3, write_medium_qwen3
from jaxserve.bench.live_server import serve
from jaxserve.demo import demo_model_path

_OPTIONS = ["--max-running-requests", "32", "--max-total-tokens", "16384", "--chunked-prefill-size", "256"]
_OPTIONS += ["--decode-row-buckets", "1,2,4,8,16,32", "--prefill-token-buckets", "32,64,128,256"]
# As text, questions are some tokens more or less when they are sent: in the middle of a bucket.
_WORK = ["--gsp-num-groups", "8", "--gsp-prompts-per-group", "6", "--gsp-system-prompt-len", "192", "--gsp-question-len", "48"]
_WORK += ["--gsp-output-len", "32"]
_SENT = ["--dataset-name", "generated-shared-prefix", "--tokenize-prompt", "--tokenizer", demo_model_path(), "--disable-tqdm"]
_SENT += ["--client-ceiling", "off", "--client-processes", "1"]
# Decode steps by rows, with little and much to look back at; steps of one prompt.
_GRIDS = [["--batch-size", "1,2,4,8,16,32", "--input-len", "8,128"], ["--batch-size", "1", "--input-len", "32,64,224"]]
_SHOWN = {
    "requests/s": "request_throughput",
    "TTFT ms, median": "median_ttft_ms",
    "TTFT ms, mean": "mean_ttft_ms",
    "TPOT ms, median": "median_tpot_ms",
    "E2E ms, median": "median_e2e_latency_ms",
    "cached %": "cache_hit_rate_pct",
}


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """What is started meanwhile has these cores, and JAX as many threads."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def move_all_but_the_scheduler(port: int, cores: Sequence[int]) -> None:
    (server,) = (child for child in psutil.Process().children() if str(port) in child.cmdline())
    for process in (server, *server.children()):
        if not any("scheduler" in word for word in process.cmdline()):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores)


def jaxserve(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "jaxserve", "bench", *words], check=True, stdout=subprocess.DEVNULL)


def last_record(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return record | record.get("cache_report", {})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, nargs="+", default=[float("inf")])
    parser.add_argument("--share-cores", action="store_true")
    args = parser.parse_args()
    device = others = sorted(os.sched_getaffinity(0))
    if not args.share_cores:
        device, others = device[:-1], device[-1:]
    if not device:
        parser.error("this machine has one core: --share-cores")
    write_medium_qwen3(MEDIUM_QWEN3)
    with tempfile.TemporaryDirectory() as folder:
        table, out = Path(folder, "steps.jsonl"), Path(folder, "run.jsonl")
        with on_cores(device):
            for grid in _GRIDS:
                words = [*grid, "--output-len", "8", "--rounds", "3", *_OPTIONS, "--output-file", str(table)]
                jaxserve("latency", str(MEDIUM_QWEN3), *words)
        for rate in args.rate:
            served, simulated = [], []
            for seed in range(args.rounds):
                load = ["--request-rate", str(rate), "--seed", str(seed), "--output-file", str(out)]
                with on_cores(device), serve("--model-path", str(MEDIUM_QWEN3), *_OPTIONS) as server:
                    move_all_but_the_scheduler(server.port, others)
                    with on_cores(others):
                        jaxserve("serving", "--port", str(server.port), *_SENT, *_WORK, *load)
                    served.append(last_record(out))
                jaxserve("simulate", "--step-times", str(table), *_WORK, *load)
                simulated.append(last_record(out))
            print(f"{rate:g} requests/s, {len(device)} of {os.cpu_count()} cores for steps, medians of {args.rounds}")
            for name, key in _SHOWN.items():
                real, virtual = (statistics.median(run[key] for run in runs) for runs in (served, simulated))
                print(f"  {name:18}{real:>10.2f} served{virtual:>10.2f} simulated{virtual / real:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
