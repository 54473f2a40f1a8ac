"""What --enable-deterministic-inference gives, and what it costs.

    python -m benchmarks.deterministic [--model-path demo] [--rounds 3] [--tokens 32] [--dtype float32]

Two engines, one with the option and one without, in turns. First how far logprobs of the same tokens are apart: 32 prompts'
tokens as they were drawn in one batch, against the same tokens given as a prompt's, and against those drawn one prompt at a
time, where these are the same tokens. Then tokens per second: of prompts alone, and of 1, 8 and 32 requests that generate;
medians over the rounds, and of the ratios within a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from jaxserve import Engine
from jaxserve.demo import demo_model_path
from jaxserve.models import ModelConfig

NUM_PROMPTS, PROMPT_LEN = 32, 100
BATCHES = (1, 8, NUM_PROMPTS)


def drawn(engine: Engine, prompts: list[list[int]], params: dict[str, Any]) -> tuple[list[list[int]], list[np.ndarray]]:
    """Of each prompt the tokens and their logprobs."""
    replies: Any = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    kept = [reply["meta_info"]["output_token_logprobs"] for reply in replies]
    return [reply["output_ids"] for reply in replies], [np.array([entry[0] for entry in entries]) for entries in kept]


def spread(engine: Engine, prompts: list[list[int]], params: dict[str, Any]) -> None:
    tokens, together = drawn(engine, prompts, params)
    whole: Any = engine.generate(
        input_ids=[prompt + new for prompt, new in zip(prompts, tokens, strict=True)],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    given = [
        np.array([entry[0] for entry in reply["meta_info"]["input_token_logprobs"][-len(new) :]])
        for reply, new in zip(whole, tokens, strict=True)
    ]
    alone = [drawn(engine, [prompt], params) for prompt in prompts]
    same = [i for i, (ids, _) in enumerate(alone) if ids == [tokens[i]]]
    show("given as a prompt's", np.concatenate(given) - np.concatenate(together))
    show("drawn alone", np.concatenate([alone[i][1][0] - together[i] for i in same] or [np.zeros(0)]))
    print(f"    {len(prompts) - len(same)} of {len(prompts)} replies have other tokens when they are drawn alone", flush=True)


def show(what: str, differences: np.ndarray) -> None:
    size = np.abs(differences)
    print(
        f"    {what:22}{len(size):6} tokens, {np.count_nonzero(size):6} differ, "
        f"mean {size.mean() if len(size) else 0:.3g}, max {size.max(initial=0):.3g}"
    )


def speeds(engine: Engine, rng: np.random.Generator, vocab_size: int, num_tokens: int) -> dict[str, float]:
    """Tokens per second; prompts are new ones each time."""
    params = {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True, "sampling_seed": 1}
    found = {}
    for batch in (0, *BATCHES):
        prompts = rng.integers(3, vocab_size - 16, (batch or NUM_PROMPTS, PROMPT_LEN)).tolist()
        engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 0})  # what generates finds its prompts cached
        if not batch:
            engine.flush_cache()
        began_s = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params=params if batch else {"max_new_tokens": 0})
        name, count = (f"generate {batch}", batch * num_tokens) if batch else ("prompts", NUM_PROMPTS * PROMPT_LEN)
        found[name] = count / (time.perf_counter() - began_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    model_path = demo_model_path() if args.model_path == "demo" else args.model_path
    vocab_size = ModelConfig.from_pretrained(model_path).vocab_size
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, vocab_size - 16, 5 + 3 * i).tolist() for i in range(NUM_PROMPTS)]
    params = {"temperature": 1.0, "max_new_tokens": args.tokens, "ignore_eos": True, "sampling_seed": 1}
    options: dict[str, Any] = {"warmup": "full", "log_level": "error", "dtype": args.dtype, "in_process": True}
    with Engine(model_path, **options) as off, Engine(model_path, enable_deterministic_inference=True, **options) as on:
        for name, engine in (("off", off), ("on", on)):
            print(f"{name}: logprobs of tokens drawn in a batch of {NUM_PROMPTS}, and of the same tokens")
            spread(engine, prompts, params)
        runs: dict[str, list[tuple[float, float]]] = {}
        for round_ in range(-1, args.rounds):  # the first warms up
            fast, exact = (speeds(engine, np.random.default_rng(round_ + 2), vocab_size, args.tokens) for engine in (off, on))
            for what in fast if round_ >= 0 else ():
                runs.setdefault(what, []).append((fast[what], exact[what]))
    print(f"\ntokens per second, medians of {args.rounds} rounds: off, on, and on / off")
    for what, pairs in runs.items():
        fast_s, exact_s = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(f"{what:14}{fast_s:10.0f}{exact_s:10.0f}{statistics.median(on / off for off, on in pairs):8.3f}")


if __name__ == "__main__":
    main()
