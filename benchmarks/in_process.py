"""What an engine loses as threads of one process, which share Python's lock, against one in processes of its own.

    python -m benchmarks.in_process [--model-path demo] [--rounds 5] [--requests 256] [--input-len 64] [--output-len 64]

Both engines run in turns, with the same requests in each round: all at once, as rollouts come, and as replies with texts. The
program that has them does nothing else meanwhile. Prints tokens per second, prompt and output, and the seconds of processor
time that a thousand tokens took, of all processes: medians over the rounds, and of their ratios within a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from jaxserve import Engine
from jaxserve.demo import demo_model_path
from jaxserve.models import ModelConfig


def processor_s(engine: Engine) -> float:
    """Of this process and the engine's."""
    times = [psutil.Process(pid).cpu_times() for pid in {psutil.Process().pid, *engine.get_all_child_pids()}]
    return sum(one.user + one.system for one in times)


def measure(engine: Engine, ask: Callable[[], Any], num_tokens: int) -> tuple[float, float]:
    """Tokens per second, and seconds of processor time for a thousand."""
    began_s, before_s = time.perf_counter(), processor_s(engine)
    ask()
    took_s = time.perf_counter() - began_s
    return num_tokens / took_s, (processor_s(engine) - before_s) / num_tokens * 1000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    args = parser.parse_args()
    model_path = demo_model_path() if args.model_path == "demo" else args.model_path
    vocab_size = ModelConfig.from_pretrained(model_path).vocab_size
    options: dict[str, Any] = {"disable_radix_cache": True, "warmup": "full", "log_level": "error"}
    params = {"temperature": 1.0, "max_new_tokens": args.output_len, "ignore_eos": True}
    num_tokens = args.requests * (args.input_len + args.output_len)
    with Engine(model_path, **options) as apart, Engine(model_path, in_process=True, **options) as inside:
        engines = {"processes": apart, "in this process": inside}
        runs: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for seed in range(-1, args.rounds):  # the first warms up
            rng = np.random.default_rng(seed + 1)
            prompts = rng.integers(3, vocab_size - 16, (args.requests, args.input_len)).tolist()
            for name in rng.permutation(list(engines)).tolist():  # none has the quieter place in each round
                engine = engines[name]
                ways: dict[str, Callable[[], Any]] = {
                    "rollout": lambda: engine.rollout(input_ids=prompts, sampling_params=params),  # noqa: B023 (called at once)
                    "generate": lambda: engine.generate(input_ids=prompts, sampling_params=params),  # noqa: B023
                }
                for way, ask in ways.items():
                    measured = measure(engine, ask, num_tokens)
                    if seed >= 0:
                        runs.setdefault((way, name), []).append(measured)
                    print(f"round {seed}: {way:10}{name:18}{measured[0]:10.0f} tokens/s", flush=True)
    print(f"\n{args.requests} requests of {args.input_len} + {args.output_len} tokens, medians of {args.rounds} rounds")
    for (way, name), values in runs.items():
        base = runs[way, "processes"]
        ratio = statistics.median(value[0] / one[0] for value, one in zip(values, base, strict=True))
        speed, cost = (statistics.median(value[i] for value in values) for i in (0, 1))
        print(f"{way:10}{name:18}{speed:10.0f} tokens/s{ratio:8.3f}{cost:10.3f} s of processor time / 1000 tokens")


if __name__ == "__main__":
    main()
