"""Benchmark (e): throughput on the demo model at batch 16 against Transformers' generate, both on this CPU, in one run.

    python -m benchmarks.vs_transformers [--batch 16] [--output-len 128]

Greedy, the same prompts of equal length, no end-of-sequence stop, so both produce the same number of tokens. The rounds
alternate, so that a slow moment of the machine hits both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from jaxserve import Engine
from jaxserve.demo import demo_model_path

PROMPT_LEN = 32


def rate(run: Callable[[], int]) -> float:
    started_s = time.perf_counter()
    tokens = run()
    return tokens / (time.perf_counter() - started_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    path, new = demo_model_path(), options.output_len
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)

    with (
        Engine(model_path=path, disable_radix_cache=True, log_level="warning", warmup="full") as engine,
        torch.inference_mode(),
    ):

        def prompts() -> list[list[int]]:
            return rng.integers(10, 1000, (options.batch, PROMPT_LEN)).tolist()

        def ours() -> int:
            sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
            replies = engine.generate(input_ids=prompts(), sampling_params=sampling)
            return sum(reply["meta_info"]["completion_tokens"] for reply in replies)

        def theirs() -> int:
            ids = torch.tensor(prompts())
            out = oracle.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new, max_new_tokens=new
            )
            return int(out[:, PROMPT_LEN:].numel())

        ours(), theirs()
        pairs = [(rate(ours), rate(theirs)) for _ in range(options.rounds)]
    ratios = [a / b for a, b in pairs]
    print(f"batch {options.batch}, {PROMPT_LEN} tokens in, {new} out, float32, {torch.get_num_threads()} torch threads")
    median_ours, median_theirs = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    print(f"jaxserve {median_ours:.0f} tok/s, Transformers {median_theirs:.0f} tok/s")
    print(f"ratio: median {statistics.median(ratios):.2f}, lowest {min(ratios):.2f} of {options.rounds} rounds")


if __name__ == "__main__":
    main()
