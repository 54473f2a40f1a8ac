"""What --load-balance-method is worth: groups of prompts that share a beginning, over four replicas.

    python -m benchmarks.replica_routing [--methods round_robin cache_aware] [--rounds 3] [--rate 24 60]
    python -m benchmarks.replica_routing --toy --rate 12

The replicas are real schedulers in processes of their own, around `benchmarks.timed_device`: a step takes 8 ms and 50 us for
each prompt token (about an 8B model on an H100), and a KV cache has room for a third of the beginnings of all prompts. `--toy`:
the demo model on this machine's CPU instead, which the replicas share. `jaxserve bench serving` sends the prompts, at random
times. Prints, for each method, medians over rounds that are taken in turns, each with a fresh server and other prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.streaming import serving as timed_serving
from jaxserve.bench.live_server import serve
from jaxserve.demo import demo_model_path

_REPLICAS = 4
_STEP_S = 0.008


@dataclasses.dataclass(frozen=True)
class Workload:
    """Ten prompts behind each of so many beginnings; a replica has room for a third of these."""

    num_groups: int
    shared_len: int
    question_len: int = 64
    output_len: int = 64

    @property
    def pool_tokens(self) -> int:
        return self.num_groups * self.shared_len // 3


_TIMED, _TOY = Workload(64, 2048), Workload(24, 768, output_len=32)
_SHOWN = {
    "requests/s": "request_throughput",
    "TTFT ms, median": "median_ttft_ms",
    "TTFT ms, p99": "p99_ttft_ms",
    "TPOT ms, median": "median_tpot_ms",
    "prompt tokens cached %": "cache_hit_rate_pct",
}


@contextlib.contextmanager
def serving(method: str, *, toy: bool) -> Iterator[int]:
    """The port of a ready server."""
    if toy:
        options = ["--model-path", "demo", "--dp-size", str(_REPLICAS), "--load-balance-method", method]
        with serve(*options, "--max-total-tokens", str(_TOY.pool_tokens)) as live:
            yield live.port
        return
    os.environ.update(TIMED_TOKEN_S="5e-5", TIMED_POOL_TOKENS=str(_TIMED.pool_tokens))
    with timed_serving(_STEP_S, dp_size=_REPLICAS, load_balance_method=method) as timed:
        yield timed.port


def load(port: int, work: Workload, seed: int, rate: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.jsonl"
        command = [sys.executable, "-m", "jaxserve", "bench", "serving", "--port", str(port), "--seed", str(seed)]
        command += ["--tokenizer", demo_model_path(), "--dataset-name", "generated-shared-prefix", "--tokenize-prompt"]
        command += ["--gsp-num-groups", str(work.num_groups), "--gsp-prompts-per-group", "10"]
        command += ["--gsp-system-prompt-len", str(work.shared_len), "--gsp-question-len", str(work.question_len)]
        command += ["--gsp-output-len", str(work.output_len), "--request-rate", str(rate)]
        command += ["--output-file", str(out), "--disable-tqdm", "--client-ceiling", "off", "--client-processes", "1"]
        subprocess.run(command, check=True, capture_output=True)
        run: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
        return {name: float((run | run["cache_report"])[key]) for name, key in _SHOWN.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", nargs="+", default=["round_robin", "shortest_queue", "total_tokens", "cache_aware"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--rate", type=float, nargs="+", default=[24.0])
    args = parser.parse_args()
    for rate in args.rate:
        runs: dict[str, list[dict[str, float]]] = {method: [] for method in args.methods}
        for seed in range(args.rounds):
            for method in args.methods:
                with serving(method, toy=args.toy) as port:
                    runs[method].append(load(port, _TOY if args.toy else _TIMED, seed, rate))
        print(f"{rate:g} requests/s, {_REPLICAS} replicas, medians of {args.rounds}")
        print(f"{'':16}" + "".join(f"{name:>24}" for name in _SHOWN))
        for method, rounds in runs.items():
            values = (statistics.median(one[name] for one in rounds) for name in _SHOWN)
            print(f"{method:16}" + "".join(f"{value:>24.1f}" for value in values), flush=True)


if __name__ == "__main__":
    main()
