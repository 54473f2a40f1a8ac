"""Decode steps of a mixture of experts on this CPU, ours and Transformers' in turns, and what of ours is reading weights.

    python -m benchmarks.moe_decode [--batch 16] [--rounds 5] [--experts 16] [--chosen 4]

A Qwen3-MoE with random weights in float32: both load the same files. The runner is called directly (`jaxserve.bench.steps`),
theirs is the model called with its KV cache, in each of the ways that it has for experts. Every row has CONTEXT_LEN tokens.

The weights of a step are those of attention, router and output head, and of the experts that some row chose, which are counted
in Transformers' routers. They are set against a plain read of an array of 1 GiB by as many threads as there are cores, measured
in the same turns: its fastest and our fastest step, as what else runs on the machine disturbs both.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

from jaxserve.bench.steps import StepDriver
from jaxserve.config import ServerArgs
from jaxserve.executor import build_runner

HIDDEN, LAYERS, EXPERT, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 512, 8, 768, 8, 2, 64, 8192
CONTEXT_LEN = 256
STEPS = 16
STREAM_BYTES = 1 << 30
FLOAT_BYTES = 4
WAYS = ("eager", "grouped_mm", "batched_mm")  # Transformers' for experts


def write_model(folder: pathlib.Path, experts: int, chosen: int) -> None:
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        moe_intermediate_size=EXPERT,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_experts=experts,
        num_experts_per_tok=chosen,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


class Ours:
    def __init__(self, folder: pathlib.Path, batch: int) -> None:
        args = ServerArgs(
            model_path=str(folder),
            max_running_requests=batch,
            max_total_tokens=batch * (CONTEXT_LEN + 64) + 2048,
            skip_tokenizer_init=True,
        )
        self.batch, self.driver = batch, StepDriver(build_runner(args, show_progress=False).runner)

    def seconds(self) -> float:
        self.driver.enter(self.batch, CONTEXT_LEN + STEPS + 2)
        return statistics.mean(self.driver.decode([CONTEXT_LEN] * self.batch, STEPS)[1:])


class Theirs:
    def __init__(self, folder: pathlib.Path, batch: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.batch = batch
        self.chosen: list[int] = []  # experts that a step of a layer reads

    @torch.inference_mode()
    def seconds(self, way: str) -> float:
        self.model.set_experts_implementation(way)
        cache, ids = self._filled(), torch.arange(self.batch)[:, None] * 37 % VOCAB
        ids = self._step(ids, cache, 0)
        started_s = time.perf_counter()
        for step in range(1, STEPS):
            ids = self._step(ids, cache, step)
        return (time.perf_counter() - started_s) / (STEPS - 1)

    @torch.inference_mode()
    def experts_read(self) -> float:
        """Different experts that the rows of a step choose in a layer, on average."""
        hooks = [layer.mlp.gate.register_forward_hook(self._count) for layer in self.model.model.layers]
        self.seconds(WAYS[0])
        for hook in hooks:
            hook.remove()
        return statistics.mean(self.chosen)

    def _count(self, module: Any, args: Any, out: Any) -> None:
        self.chosen.append(len(torch.unique(out[2])))

    def _step(self, ids: torch.Tensor, cache: DynamicCache, step: int) -> torch.Tensor:
        position = torch.full_like(ids, CONTEXT_LEN + step)
        tokens: torch.Tensor = self.model(ids, None, position, cache, use_cache=True).logits.argmax(-1)
        return tokens

    def _filled(self) -> DynamicCache:
        cache, shape = DynamicCache(config=self.model.config), (self.batch, KV_HEADS, CONTEXT_LEN, HEAD_DIM)
        for layer in range(LAYERS):
            cache.update(torch.randn(shape), torch.randn(shape), layer)
        return cache


class Stream:
    """Reads an array that no cache holds."""

    def __init__(self) -> None:
        self._threads = os.cpu_count() or 1
        self._parts = np.array_split(np.ones(STREAM_BYTES // FLOAT_BYTES, np.float32), self._threads)
        self._pool = ThreadPoolExecutor(self._threads)

    def bytes_per_s(self) -> float:
        started_s = time.perf_counter()
        list(self._pool.map(np.max, self._parts))
        return STREAM_BYTES / (time.perf_counter() - started_s)


def weight_bytes(experts: int, experts_read: float) -> float:
    """Of a step."""
    attention = HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD_DIM + HEADS * HEAD_DIM * HIDDEN
    layer = attention + HIDDEN * experts + 3 * HIDDEN * EXPERT * experts_read
    return FLOAT_BYTES * (LAYERS * layer + HIDDEN * VOCAB)


@dataclasses.dataclass(frozen=True)
class Round:
    ours_s: float
    theirs_s: dict[str, float]
    stream: float  # bytes per second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--chosen", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_model(folder, options.experts, options.chosen)
        ours, theirs = Ours(folder, options.batch), Theirs(folder, options.batch)
        stream = Stream()
        read = theirs.experts_read()
        ours.seconds()
        rounds = [
            Round(ours.seconds(), {way: theirs.seconds(way) for way in WAYS}, stream.bytes_per_s())
            for _ in range(options.rounds)
        ]
    num_bytes, fastest_s = weight_bytes(options.experts, read), min(found.ours_s for found in rounds)
    print(f"batch {options.batch}, {options.chosen} of {options.experts} experts; a layer's rows chose {read:.1f} of them")
    print(f"jaxserve                 {statistics.median(found.ours_s for found in rounds) * 1e3:7.1f} ms a step")
    for way in WAYS:
        ratios = [found.theirs_s[way] / found.ours_s for found in rounds]
        median_s = statistics.median(found.theirs_s[way] for found in rounds)
        print(
            f"Transformers, {way:10s} {median_s * 1e3:7.1f} ms a step, ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
    stream_rate = max(found.stream for found in rounds)
    print(f"weights of a step: {num_bytes / 1e6:.0f} MB; a plain read runs at {stream_rate / 1e9:.1f} GB/s")
    print(f"reading them is {100 * num_bytes / stream_rate / fastest_s:.0f} % of our fastest step, {fastest_s * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
