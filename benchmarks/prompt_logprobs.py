"""What logprobs of a prompt cost: prompts with them against the same prompts without, in turns, within one run.

    python -m benchmarks.prompt_logprobs

The demo model's vocabulary is small; how much a line of logits costs beside a layer differs from model to model.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from jaxserve import Engine
from jaxserve.demo import demo_model_path

PROMPT_LEN, NUM_PROMPTS, NUM_TURNS = 1500, 8, 5
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "logprobs of outputs": {"return_logprob": True},
    "of the prompt": {"return_logprob": True, "logprob_start_len": 0},
    "of the prompt, 5 likeliest": {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 5},
    "of the prompt, 8 named tokens": {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": list(range(8))},
    "hidden states": {"return_hidden_states": True},
}


def main() -> None:
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {what: [] for what in ASKED}
    with Engine(demo_model_path(), enable_return_hidden_states=True, disable_radix_cache=True, warmup="full") as engine:
        prompts = rng.integers(5, 400, (NUM_PROMPTS, PROMPT_LEN)).tolist()
        for turn in range(NUM_TURNS + 1):
            for what, fields in ASKED.items():
                started_s = time.perf_counter()
                engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 1, "temperature": 0}, **fields)
                if turn:
                    seconds[what].append(time.perf_counter() - started_s)
    plain = statistics.median(seconds["nothing"])
    print(f"{NUM_PROMPTS} prompts of {PROMPT_LEN} tokens, median of {NUM_TURNS} turns")
    for what, times in seconds.items():
        took = statistics.median(times)
        print(f"  {what:<32}{took:7.3f} s {took / plain:6.2f} times nothing (from {min(times):.3f} to {max(times):.3f} s)")


if __name__ == "__main__":
    main()
