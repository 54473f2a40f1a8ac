"""A crowd of clients of a live server, and what each must be answered."""

from __future__ import annotations

import numpy as np
from live_server import LiveServer
from parity import Oracle

CROWD = 64
LEN = 12


def prompts(oracle: Oracle, seed: int) -> list[list[int]]:
    """A crowd's, half of them behind a few shared beginnings."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return rng.integers(3, oracle.config.vocab_size, count).tolist()

    shared = [tokens(70) for _ in range(4)]
    return [[*(shared[i % 4] if i % 2 else []), *tokens(int(rng.integers(1, 60)))] for i in range(CROWD)]


def ask(server: LiveServer, index: int, prompt: list[int]) -> list[int]:
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": LEN, "ignore_eos": True}}
    if index % 3:
        output: list[int] = server.generate(**body)["output_ids"]
        return output
    *_, last = server.stream("/generate", body)
    return list(last["output_ids"])


def check(oracle: Oracle, prompt: list[int], answer: list[int]) -> None:
    assert len(answer) == LEN
    best = oracle.logprobs([*prompt, *answer]).argmax(-1)[len(prompt) - 1 : -1].tolist()
    assert answer == best
