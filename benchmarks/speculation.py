"""What n-gram drafts bring on a task that copies: tokens per second with and without, in one run.

    python -m benchmarks.speculation [--requests 1 8] [--turns 8] [--drafts 4 8]

The demo model is asked to repeat sentences of 24 words, some at a time, in several turns. Each setting is an Engine of its own;
settings take turns, and the best of three rounds counts. Prints tokens per second, the accept length and the ratio.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import jaxserve
from jaxserve.demo import demo_model_path

WORDS = (
    "apple river stone green bread cloud horse seven table light north glass paper smile winter garden music silver window "
    "forest letter yellow summer bridge pocket orange doctor flower market island"
)
ROUNDS = 3


def measure(engine: jaxserve.Engine, turns: list[list[str]]) -> tuple[float, float | None, list[Any]]:
    """Tokens per second, accept length, and what was generated."""
    params = {"temperature": 0, "max_new_tokens": 128}
    started_s = time.perf_counter()
    replies: list[Any] = [reply for prompts in turns for reply in engine.generate(prompts, params)]
    elapsed_s = time.perf_counter() - started_s
    accepted = [reply["meta_info"].get("spec_accept_length") for reply in replies]
    mean = sum(accepted) / len(accepted) if all(accepted) else None
    return sum(len(reply["output_ids"]) for reply in replies) / elapsed_s, mean, [reply["output_ids"] for reply in replies]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8])
    options = parser.parse_args()
    common: dict[str, Any] = {
        "max_running_requests": max(options.requests),
        "context_length": 1024,
        "disable_radix_cache": True,
        "warmup": "full",
    }
    settings: dict[str, dict[str, Any]] = {"off": {}}
    for count in options.drafts:
        settings[f"NGRAM, {count} tokens"] = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": count}
    rng = random.Random(0)
    sentences = [" ".join(rng.sample(WORDS.split(), 24)) for _ in range(max(options.requests) * options.turns)]
    prompts = [f"<|im_start|>user\nRepeat after me: {text}<|im_end|>\n<|im_start|>assistant\n" for text in sentences]
    engines = {name: jaxserve.Engine(demo_model_path(), **common, **extra) for name, extra in settings.items()}
    try:
        for count in options.requests:
            best: dict[str, tuple[float, float | None, list[Any]]] = {}
            turns = [prompts[first : first + count] for first in range(0, count * options.turns, count)]
            for _ in range(ROUNDS):
                for name, engine in engines.items():
                    best[name] = max(best.get(name, (0.0, None, [])), measure(engine, turns), key=lambda m: m[0])
            plain = best["off"]
            for name, (speed, accept_len, tokens) in best.items():
                same = "" if tokens == plain[2] else "  DIFFERENT TOKENS"
                length = "" if accept_len is None else f"  accept length {accept_len:.2f}"
                print(f"{count:3} requests  {name:16} {speed:7.0f} tokens/s  ratio {speed / plain[0]:.2f}{length}{same}")
    finally:
        for engine in engines.values():
            engine.shutdown()


if __name__ == "__main__":
    main()
