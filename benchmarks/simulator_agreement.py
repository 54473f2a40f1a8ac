"""How near `jaxserve bench simulate` comes to a server: the same prompts, answered by both.

    python -m benchmarks.simulator_agreement [--rounds 3] [--rate inf]

The server runs a Qwen3 of 129M parameters (`benchmarks.medium_model`) on this machine's CPU; what its steps take is measured
before by `jaxserve bench latency`, at the sizes that they are padded to. Prints what the server showed and what was simulated,
and their ratio, medians over rounds with other prompts. On a machine of few cores the clients and the HTTP process take some of
the CPU that steps are computed with, which nobody simulates: the smaller the model, the more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.medium_model import MEDIUM_QWEN3, write_medium_qwen3
from jaxserve.bench.live_server import serve
from jaxserve.demo import demo_model_path

_OPTIONS = ["--max-running-requests", "32", "--max-total-tokens", "16384", "--chunked-prefill-size", "256"]
_OPTIONS += ["--decode-row-buckets", "1,2,4,8,16,32", "--prefill-token-buckets", "32,64,128,256"]
_WORK = ["--gsp-num-groups", "8", "--gsp-prompts-per-group", "6", "--gsp-system-prompt-len", "192", "--gsp-question-len", "32"]
_WORK += ["--gsp-output-len", "32"]
_SHOWN = {
    "requests/s": "request_throughput",
    "TTFT ms, median": "median_ttft_ms",
    "TTFT ms, mean": "mean_ttft_ms",
    "TPOT ms, median": "median_tpot_ms",
    "E2E ms, median": "median_e2e_latency_ms",
    "cached %": "cache_hit_rate_pct",
}


def jaxserve(*words: str) -> str:
    command = [sys.executable, "-m", "jaxserve", "bench", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def last_record(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return record | record.get("cache_report", {})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, nargs="+", default=[float("inf")])
    args = parser.parse_args()
    write_medium_qwen3(MEDIUM_QWEN3)
    with tempfile.TemporaryDirectory() as folder:
        table, out = Path(folder, "steps.jsonl"), str(Path(folder, "run.jsonl"))
        grid = ["--batch-size", "1,2,4,8,16,32", "--input-len", "8,32,128,224", "--output-len", "8", "--rounds", "3"]
        jaxserve("latency", str(MEDIUM_QWEN3), *grid, *_OPTIONS, "--output-file", str(table))
        for rate in args.rate:
            served, simulated = [], []
            for seed in range(args.rounds):
                with serve("--model-path", str(MEDIUM_QWEN3), *_OPTIONS) as server:
                    words = ["--port", str(server.port), "--dataset-name", "generated-shared-prefix", "--tokenize-prompt"]
                    words += ["--tokenizer", demo_model_path(), "--disable-tqdm", "--client-ceiling", "off"]
                    words += ["--client-processes", "1", "--request-rate", str(rate), "--seed", str(seed)]
                    jaxserve("serving", *_WORK, *words, "--output-file", out)
                    served.append(last_record(Path(out)))
                words = ["--step-times", str(table), "--request-rate", str(rate), "--seed", str(seed)]
                jaxserve("simulate", *_WORK, *words, "--output-file", out)
                simulated.append(last_record(Path(out)))
            print(f"{rate:g} requests/s, medians of {args.rounds}")
            for name, key in _SHOWN.items():
                real, virtual = (statistics.median(run[key] for run in runs) for runs in (served, simulated))
                print(f"  {name:18}{real:>10.2f} served{virtual:>10.2f} simulated{virtual / real:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
