"""Bubbles of pipelines in a live server, beside those that are simulated: the same requests, options and times of stages.

    python -m benchmarks.pipeline_live [--pp-size 1 2 4] [--rounds 3]

Of the live server only the stages are not real: `benchmarks.timed_device` is busy for equal parts of a step in each. The
simulated one is `jaxserve bench simulate`'s, with the same scheduler and stages in virtual time, and requests at the times at
which the live one's were sent. Prints medians over rounds, each with other prompts and times. Bubbles are the share of the
stages' time, while a step is in any of them, in which they stand idle.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.streaming import TimedServer, serving
from benchmarks.timed_device import FIRST_TOKEN, NUM_TOKENS, environment, timed_spec
from jaxserve.bench.simulate import Arrival, LinearStepTimes, Simulation, evenly
from jaxserve.config import ServerArgs
from jaxserve.demo import demo_model_path

# Long steps, beside which it matters little that all processes share a few cores.
TIMES = LinearStepTimes(step_s=0.02, prefill_token_s=2e-4, decode_row_s=3e-3, pair_s=1.6e-7)
_CHUNK_TOKENS = 512
_RATE = 100.0  # requests per second


@dataclasses.dataclass(frozen=True)
class Requests:
    count: int
    input_len: int
    output_len: int


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sent one after the other, at random times."""

    title: str
    parts: tuple[Requests, ...]
    latency: str  # the field that is shown

    def prompts(self, seed: int) -> list[tuple[list[int], int]]:
        """Token ids, and how many to answer with."""
        rng, each = np.random.default_rng(seed), (part for part in self.parts for _ in range(part.count))
        return [((FIRST_TOKEN + rng.integers(NUM_TOKENS, size=part.input_len)).tolist(), part.output_len) for part in each]


_LONG, _SHORT = Requests(1, 4000, 2), Requests(16, 32, 64)
DECODING = Workload("64 requests that decode: 32 tokens in, 64 out", (Requests(64, 32, 64),), "median_tpot_ms")
ALONE = Workload("One prompt of 4,000 tokens", (_LONG,), "median_ttft_ms")
BESIDE = Workload(
    "Four prompts of 4,000 tokens beside 16 requests that decode: 32 tokens in, 64 out",
    (_SHORT, dataclasses.replace(_LONG, count=4)),
    "max_ttft_ms",
)
_LATENCIES = {"median_tpot_ms": "TPOT, ms", "median_ttft_ms": "TTFT, ms", "max_ttft_ms": "longest TTFT, ms"}


@dataclasses.dataclass(frozen=True)
class Seen:
    bubble_pct: float
    tokens_per_s: float  # in and out
    latency_ms: float

    @staticmethod
    def median_of(rounds: Sequence[Seen]) -> Seen:
        return Seen(*(statistics.median(values) for values in zip(*map(dataclasses.astuple, rounds), strict=True)))


class Comparison(NamedTuple):
    live: Seen
    simulated: Seen


def compare(server: TimedServer, work: Workload, seed: int, options: dict[str, Any]) -> Comparison:
    prompts, before = work.prompts(seed), device_times(server)
    record = send(server.port, prompts, seed)
    busy_s, active_s = device_times(server) - before
    record |= {"bubble_pct": 100 * max(1 - busy_s / active_s, 0.0), "max_ttft_ms": 1e3 * max(record["ttfts"])}

    args, sent_s = ServerArgs(model_path="simulated", **options), record["start_times"]
    arrivals = [
        Arrival(at_s, np.array(prompt, np.int32), output_len)
        for at_s, (prompt, output_len) in zip(sent_s, prompts, strict=True)
    ]
    report = Simulation(args, timed_spec(args, TIMES), evenly(TIMES, args.pp_size)).run(arrivals)
    expected = report.record({}) | {"max_ttft_ms": 1e3 * max(report.ttft_s)}
    return Comparison(seen_in(record, work), seen_in(expected, work))


def seen_in(record: dict[str, Any], work: Workload) -> Seen:
    return Seen(record["bubble_pct"], record["input_throughput"] + record["output_throughput"], record[work.latency])


def device_times(server: TimedServer) -> np.ndarray:
    """Seconds that stages were busy, on average, and that any was."""
    device = server.get("/server_info")["internal_states"][0]["runner"]
    return np.array([device["busy_s"], device["active_s"]])


def send(port: int, prompts: Sequence[tuple[list[int], int]], seed: int) -> dict[str, Any]:
    """What `jaxserve bench serving` saw."""
    with tempfile.TemporaryDirectory() as folder:
        dataset, out = Path(folder, "prompts.jsonl"), Path(folder, "run.jsonl")
        lines = ({"prompt": prompt, "output_len": output_len} for prompt, output_len in prompts)
        dataset.write_text("\n".join(map(json.dumps, lines)))
        command = [sys.executable, "-m", "jaxserve", "bench", "serving", "--port", str(port), "--warmup-requests", "0"]
        command += ["--tokenizer", demo_model_path(), "--dataset-name", "custom", "--dataset-path", str(dataset)]
        command += ["--output-file", str(out), "--output-details", "--disable-tqdm", "--client-ceiling", "off"]
        command += ["--flush-cache", "--request-rate", str(_RATE), "--seed", str(seed)]
        subprocess.run([*command, "--client-processes", "1"], check=True, capture_output=True)
        record: dict[str, Any] = json.loads(out.read_text())
    assert record["completed"] == len(prompts), record
    return record


def measure(pp_size: int, works: Sequence[Workload], rounds: int, **options: Any) -> list[str]:
    """A line of a table for each workload."""
    options = {"pp_size": pp_size, "chunked_prefill_size": _CHUNK_TOKENS, "enable_mixed_chunk": True, **options}
    lines = []
    with serving(TIMES.step_s, **options) as server:
        for work in works:
            compared = [compare(server, work, seed, options) for seed in range(rounds)]
            lines.append(line_of(*map(Seen.median_of, zip(*compared, strict=True))))
    return lines


def line_of(live: Seen, simulated: Seen) -> str:
    cells = [f"{live.bubble_pct:.1f} %", f"{simulated.bubble_pct:.1f} %"]
    cells += [f"{live.tokens_per_s:,.0f}", f"{simulated.tokens_per_s:,.0f}"]
    cells += [f"{live.tokens_per_s / simulated.tokens_per_s:.3f}"]
    cells += [f"{live.latency_ms:,.0f}", f"{simulated.latency_ms:,.0f}"]
    return " | ".join(cells)


def print_table(work: Workload, lines: dict[str, str]) -> None:
    """`lines`: by --pp-size and chunks."""
    shown = _LATENCIES[work.latency]
    print(f"\n### {work.title}\n")
    print("| `--pp-size` | chunks | bubbles: live | simulated | tokens/s: live | simulated | ratio |", end="")
    print(f" {shown}: live | simulated |\n|--:|---|--:|--:|--:|--:|--:|--:|--:|")
    for of, line in lines.items():
        print(f"| {of} | {line} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pp-size", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ.update(environment(TIMES))
    tables: dict[Workload, dict[str, str]] = {DECODING: {}, ALONE: {}, BESIDE: {}}
    for pp_size in args.pp_size:
        for is_dynamic in (False, True):
            works = (ALONE, BESIDE) if is_dynamic else (DECODING, ALONE, BESIDE)
            lines = measure(pp_size, works, args.rounds, enable_dynamic_chunking=is_dynamic)
            for work, line in zip(works, lines, strict=True):
                tables[work][f"{pp_size} | {'dynamic' if is_dynamic else 'fixed'}"] = line
    print(f"Steps take {TIMES.step_s * 1e3:g} ms, {TIMES.prefill_token_s * 1e6:g} us for each token of a prompt, ", end="")
    print(f"{TIMES.pair_s * 1e9:g} ns for each before it, {TIMES.decode_row_s * 1e3:g} ms for each row that decodes.")
    for work, table in tables.items():
        print_table(work, table)


if __name__ == "__main__":
    main()
