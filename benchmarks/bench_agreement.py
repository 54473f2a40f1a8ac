"""`jaxserve bench serving` beside SGLang's own bench_serving: the same server, prompts, lengths and load, in turns.

    python -m benchmarks.bench_agreement --python THEIR_ENV/bin/python --checkout SGLANG/python/sglang
        [--together] [--step-s 0.02] [--backend sglang] [--rounds 5] [--max-concurrency 4 | --request-rate 4] ...

THEIR_ENV has aiohttp, requests, orjson, transformers and pillow; what their client imports of their runtime (one constant, two
functions of addresses) is put in its place. The server is the demo model, or with --step-s the demo model's server on a device
whose steps take that long, which leaves the machine quiet. All prompts have one length. By default the two take turns, with the
same prompts, and the prefix cache is emptied before each run. On a machine that others use, each then meets another machine:
--together sends both loads at the same time, with prompts of the same length. Prints medians over the rounds, and their ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.streaming import serving
from jaxserve.bench.live_server import serve
from jaxserve.bench.serving.datasets import make_tasks
from jaxserve.bench.serving.options import ServingOptions
from jaxserve.bench.serving.tokens import Tokens
from jaxserve.demo import demo_model_path

_THEIRS = """
import importlib, sys, types
def module(name, **content):
    sys.modules[name] = one = types.ModuleType(name)
    vars(one).update(content)
module("sglang", __path__=[sys.argv.pop(1)])
for name in ("sglang.srt", "sglang.srt.disaggregation", "sglang.srt.utils"):
    module(name, __path__=[])
module("sglang.srt.disaggregation.utils", FAKE_BOOTSTRAP_HOST="")
own = lambda base, host, port: base
module("sglang.srt.utils.network", resolve_base_url=own, resolve_host_port=own)
importlib.import_module("sglang.benchmark.serving").cli_main()
"""
_KEYS = ("completed", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput", "mean_ttft_ms",
         "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "mean_itl_ms", "median_itl_ms", "p99_itl_ms",
         "mean_e2e_latency_ms", "median_e2e_latency_ms", "p99_e2e_latency_ms", "concurrency")  # fmt: skip


def write_prompts(path: Path, options: argparse.Namespace, seed: int) -> None:
    """In SGLang's `custom` form: conversations, of which the answers do not matter."""
    lengths: dict[str, Any] = {
        "num_prompts": options.num_prompts,
        "random_input_len": options.input_len,
        "random_range_ratio": 1.0,
    }
    tasks = make_tasks(ServingOptions(**lengths, seed=seed), Tokens.load("demo"))
    talks = ([{"content": task.turns[0]}, {"content": "one two three"}] for task in tasks)
    path.write_text("".join(json.dumps({"conversations": talk}) + "\n" for talk in talks))


@contextlib.contextmanager
def server_port(step_s: float | None) -> Iterator[int]:
    if step_s:
        with serving(step_s, served_model_name="demo") as timed:
            yield timed.port
    else:
        with serve("demo") as server:
            yield server.port


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two clients."""

    command: list[str]
    folder: Path
    options: argparse.Namespace

    def start(self, number: int, seed: int) -> subprocess.Popen[str]:
        prompts = self.folder / f"{seed}.jsonl"
        write_prompts(prompts, self.options, seed)
        words = ["--dataset-path", str(prompts), "--seed", str(seed), "--output-file", str(self.folder / f"{number}.json")]
        return subprocess.Popen([*self.command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def record(self, process: subprocess.Popen[str], number: int) -> dict[str, Any]:
        told, _ = process.communicate()
        if process.returncode != 0:
            raise RuntimeError(told)
        record: dict[str, Any] = json.loads((self.folder / f"{number}.json").read_text())
        return record


def in_turns(ours: Side, theirs: Side, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    order = (ours, theirs) if number % 2 == 0 else (theirs, ours)
    first, second = (side.record(side.start(number, number), number) for side in order)
    return (first, second) if number % 2 == 0 else (second, first)


def together(ours: Side, theirs: Side, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ours starts when theirs has warmed up; each has its own prompts."""
    process = theirs.start(number, 1000 + number)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Warmup completed"):
            break
    record = ours.record(ours.start(number, number), number)
    return record, theirs.record(process, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="of an environment for SGLang's client")
    parser.add_argument("--checkout", required=True, help="the folder python/sglang of SGLang")
    parser.add_argument("--backend", default="sglang", help="sglang, sglang-oai or sglang-oai-chat")
    parser.add_argument("--step-s", type=float)
    parser.add_argument("--together", action="store_true", help="both at the same time, at the same server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-prompts", type=int, default=100)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--max-concurrency", type=int)
    parser.add_argument("--request-rate", type=float)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, server_port(options.step_s) as port:
        shared = [
            "--backend", options.backend, "--base-url", f"http://127.0.0.1:{port}", "--num-prompts", str(options.num_prompts),
            "--dataset-name", "custom", "--sharegpt-output-len", str(options.output_len), "--tokenizer", demo_model_path(),
            "--model", "demo", "--disable-tqdm",
        ]  # fmt: skip
        for name in ("max_concurrency", "request_rate"):
            if getattr(options, name):
                shared += ["--" + name.replace("_", "-"), str(getattr(options, name))]
        if not options.together:
            shared.append("--flush-cache")
        sides = []
        for name, words in (("ours", ["-m", "jaxserve", "bench", "serving"]), ("theirs", ["-c", _THEIRS, options.checkout])):
            (Path(folder) / name).mkdir()
            python = sys.executable if name == "ours" else options.python
            sides.append(Side([python, "-u", *words, *shared], Path(folder) / name, options))
        measure = together if options.together else in_turns
        rounds = [measure(*sides, number) for number in range(options.rounds)]
    print(f"{'':<24}{'ours':>10}{'theirs':>10}  ratio (least and greatest of {options.rounds} rounds)")
    for key in _KEYS:
        pairs = [(float(a[key]), float(b[key])) for a, b in rounds]
        mine, other = (statistics.median(values) for values in zip(*pairs, strict=True))
        ratios = [a / b for a, b in pairs]
        print(f"{key:<24}{mine:>10.2f}{other:>10.2f}  {mine / other:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
