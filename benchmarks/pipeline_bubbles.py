"""How busy the stages of a pipeline are: `python -m benchmarks.pipeline_bubbles > benchmarks/results/pipeline_bubbles.md`.

The real scheduler with simulated stages (`bench simulate`), each of which takes as long as the roofline says of its layers of
Llama-3.1-70B on its part of eight H200. Nothing is measured, so every machine prints the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.model_configs import LLAMA_70B, write_config
from jaxserve.aot.fitting import Demand
from jaxserve.aot.targets import parse_target
from jaxserve.bench.simulate import Arrival, Report, Simulation
from jaxserve.bench.simulate.plan import resolved, runner_spec
from jaxserve.bench.simulate.roofline import RooflineTimes, stage_shards
from jaxserve.models import ModelConfig
from jaxserve.models.step_work import attention_work_ratio

H200 = parse_target("h200:8")
HOST_S = 3e-4

HEADER = """# Bubbles of pipelines

The real scheduler, with simulated stages: each takes as long as the roofline says of its layers of Llama-3.1-70B (bfloat16) on
its part of eight H200 (`--tp-size` is 8 / `--pp-size`), and the host {host_us:.0f} us for each round. Nothing was measured or
run on a GPU; launches, latencies of links, sampling and what kernels lose come on top, in all columns alike. What stages hand
on takes no time.

`python -m benchmarks.pipeline_bubbles` made this file; it prints the same on every machine.

**bubbles**: the share of the stages' time, while a step is in any of them, in which they stand idle. **all rows in each step**
is a scheduler that knows of no stages: the next step needs the tokens of the one before, so one stage works at a time.
"""


class Runs:
    def __init__(self, config: ModelConfig) -> None:
        demand = Demand(config, "bfloat16", "bfloat16", config.context_len, mem_fraction=0.9, row_table_bytes=0)
        self._times = {
            pp_size: RooflineTimes(H200, stage_shards(demand, H200.num_devices // pp_size, pp_size)) for pp_size in (1, 2, 4, 8)
        }
        self._ratio = attention_work_ratio(config)

    def __call__(
        self, arrivals: Iterable[Arrival], longest: int, pp_size: int, *, deals: bool = True, **options: object
    ) -> Report:
        """`deals`: the scheduler knows of the stages."""
        given = {"page_size": 64, "max_total_tokens": 2_600_000, "pp_size": pp_size if deals else 1, **options}
        args = resolved(given, "gpu", longest)
        simulation = Simulation(args, runner_spec(args, self._ratio), self._times[pp_size], host_s=HOST_S, path_s=0.0)
        return simulation.run(arrivals)


def crowd(count: int, input_len: int, output_len: int, first: int = 0) -> list[Arrival]:
    """All at once, no two prompts alike."""
    tokens = np.arange(1, input_len + 1, dtype=np.int32)
    prompts = (tokens + 1009 * (first + number) for number in range(count))
    return [Arrival(0.0, prompt, output_len) for prompt in prompts]


def decoding(runs: Runs) -> None:
    print("## Many requests that decode\n\n256 at once, 512 tokens in, 256 out.\n")
    print(
        "| `--pp-size` | bubbles | output tokens/s | TPOT, ms | all rows in each step: bubbles | output tokens/s | TPOT, ms |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|")
    work = crowd(256, 512, 256)
    for pp_size in (1, 2, 4, 8):
        cells = []
        for deals in (True, False):
            record = runs(work, 800, pp_size, deals=deals).record({})
            cells += [f"{record['bubble_pct']:.1f} %", f"{record['output_throughput']:,.0f}", f"{record['median_tpot_ms']:.1f}"]
        print(f"| {pp_size} | {' | '.join(cells)} |")


def few(runs: Runs) -> None:
    print(
        "\n## Few requests\n\n`--pp-size 4`, 512 tokens in, 256 out: with fewer requests than stages some stages have none.\n"
    )
    print("| requests | bubbles | output tokens/s | TPOT, ms | `--pp-size 1`: output tokens/s | TPOT, ms |")
    print("|--:|--:|--:|--:|--:|--:|")
    for count in (1, 2, 3, 4, 8, 16):
        staged, whole = (runs(crowd(count, 512, 256), 800, pp_size).record({}) for pp_size in (4, 1))
        cells = [f"{staged['bubble_pct']:.1f} %"]
        for record in (staged, whole):
            cells += [f"{record['output_throughput']:,.0f}", f"{record['median_tpot_ms']:.1f}"]
        print(f"| {count} | {' | '.join(cells)} |")


def prompts(runs: Runs) -> None:
    print("\n## Long prompts\n\nChunks of 8192 tokens; with `--enable-dynamic-chunking` they get shorter as a prompt goes on.")
    print("Alone: one prompt of 128k tokens. Beside others: four of them, while 64 requests of 512 tokens decode 512 tokens.\n")
    print("| `--pp-size` | chunks | alone: bubbles | TTFT, s | beside others: bubbles | longest TTFT, s | median TPOT, ms |")
    print("|--:|---|--:|--:|--:|--:|--:|")
    length = 131_072
    for pp_size in (1, 2, 4, 8):
        for is_dynamic in (False, True):
            options: dict[str, Any] = {"enable_dynamic_chunking": is_dynamic, "chunked_prefill_size": 8192}
            alone = runs(crowd(1, length, 2), length + 8, pp_size, **options).record({})
            work = [*crowd(64, 512, 512), *crowd(4, length, 2, first=64)]
            beside = runs(work, length + 8, pp_size, enable_mixed_chunk=True, **options)
            found = beside.record({})
            cells = [f"{alone['bubble_pct']:.1f} %", f"{alone['median_ttft_ms'] / 1e3:.2f}", f"{found['bubble_pct']:.1f} %"]
            cells += [f"{max(beside.ttft_s):.2f}", f"{found['median_tpot_ms']:.1f}"]
            print(f"| {pp_size} | {'dynamic' if is_dynamic else 'fixed'} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig.from_pretrained(write_config(Path(folder), LLAMA_70B))
    print(HEADER.format(host_us=HOST_S * 1e6))
    runs = Runs(config)
    decoding(runs)
    few(runs)
    prompts(runs)


if __name__ == "__main__":
    main()
