"""What n-gram drafts bring on a task that copies: tokens per second with and without, in one run.

    python -m benchmarks.speculation [--requests 1 8] [--tokens 384] [--drafts 4 8]

The demo model is asked, greedily, for long continuations: it soon repeats what it has written, which is what copying looks like
to a draft. Each setting is an Engine of its own; settings take turns, and the best of three rounds counts. Prints tokens per
second, the accept length and the ratio.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import jaxserve
from jaxserve.demo import demo_model_path

TEXT = "the model reads a page of text and then it writes the same page again word for word until the page ends"
ROUNDS = 3


def measure(engine: jaxserve.Engine, prompts: list[str], num_tokens: int) -> tuple[float, float | None, list[Any]]:
    """Tokens per second, accept length, and what was generated."""
    params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    started_s = time.perf_counter()
    replies: Any = engine.generate(prompts, params)
    elapsed_s = time.perf_counter() - started_s
    accepted = [reply["meta_info"].get("spec_accept_length") for reply in replies]
    mean = sum(accepted) / len(accepted) if all(accepted) else None
    return len(prompts) * num_tokens / elapsed_s, mean, [reply["output_ids"] for reply in replies]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=384)
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
    prompts = [" ".join(rng.sample(TEXT.split(), 12)) for _ in range(max(options.requests))]
    engines = {name: jaxserve.Engine(demo_model_path(), **common, **extra) for name, extra in settings.items()}
    try:
        for count in options.requests:
            best: dict[str, tuple[float, float | None, list[Any]]] = {}
            for _ in range(ROUNDS):
                for name, engine in engines.items():
                    best[name] = max(
                        best.get(name, (0.0, None, [])), measure(engine, prompts[:count], options.tokens), key=lambda m: m[0]
                    )
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
