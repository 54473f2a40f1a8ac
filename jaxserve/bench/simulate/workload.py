"""What arrives when: prompts of tokens, as they are needed, so that a million of them takes no more memory than one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_VOCAB = 32_000
_FIRST_TOKEN = 10  # below: what the simulated device samples
_TRACE_BLOCK = 512  # tokens that a hash of a trace stands for


@dataclasses.dataclass(frozen=True)
class Arrival:
    at_s: float
    prompt: np.ndarray  # int32 [prompt_len]
    output_len: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedPrefixes:
    """As many prompts behind each of several beginnings, in any order, at random times: `bench serving`'s
    generated-shared-prefix, at the times that it has for the same seed. With beginnings of no length they are plain random
    prompts."""

    rate: float  # requests per second
    num_groups: int = 64
    prompts_per_group: int = 16
    shared_len: int = 2048
    question_len: int = 128
    output_len: int = 256
    seed: int = 0

    def __iter__(self) -> Iterator[Arrival]:
        rng, clock = np.random.default_rng(self.seed), np.random.default_rng(self.seed)
        clock.exponential()  # as long before the first
        shared = rng.integers(_FIRST_TOKEN, _VOCAB, (self.num_groups, self.shared_len), np.int32)
        at_s = 0.0
        for number in rng.permutation(self.num_groups * self.prompts_per_group):
            question = rng.integers(_FIRST_TOKEN, _VOCAB, self.question_len, np.int32)
            yield Arrival(at_s, np.concatenate([shared[number // self.prompts_per_group], question]), self.output_len)
            at_s += clock.exponential(1 / self.rate)

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its output."""
        return self.shared_len + self.question_len + self.output_len


def read_trace(path: Path, speed: float = 1.0) -> Iterator[Arrival]:
    """From a file in Mooncake's form: lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for
    each 512 tokens of the prompt; equal ones are equal tokens. `speed`: so many times as fast. ValueError for other lines."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            length, hashes = int(entry["input_length"]), entry["hash_ids"]
            blocks = [np.random.default_rng(block).integers(_FIRST_TOKEN, _VOCAB, _TRACE_BLOCK, np.int32) for block in hashes]
            prompt = np.concatenate(blocks)[:length]
            arrival = Arrival(float(entry["timestamp"]) / 1e3 / speed, prompt, int(entry["output_length"]))
            if len(prompt) < length or arrival.output_len < 1:
                raise ValueError("hash_ids are too few, or output_length is 0")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is no request of a Mooncake trace: {error}.") from error
        yield arrival
