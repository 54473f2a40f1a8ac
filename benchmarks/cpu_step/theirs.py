"""Transformers: the model called with its own KV cache, greedy. All rows of a batch are as long as ours on average."""

from __future__ import annotations

import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.cpu_step.cases import DECODE_STEPS, PROMPT_LEN, batch_of, contexts


class Transformers:
    def __init__(self, model_path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def seconds(self, case: str) -> float:
        """Of a prompt, or of one decode step."""
        batch = batch_of(case)
        return self._prefill() if batch is None else self._decode(batch)

    def _prefill(self) -> float:
        ids = torch.arange(10, 10 + PROMPT_LEN)[None] % 2000
        started_s = time.perf_counter()
        self.model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).item()
        return time.perf_counter() - started_s

    def _decode(self, batch: int) -> float:
        cache, length = self._filled(batch), sum(contexts(batch)) // batch
        ids = self._step(torch.full((batch, 1), 10), cache, length)
        started_s = time.perf_counter()
        for step in range(1, DECODE_STEPS):
            ids = self._step(ids, cache, length + step)
        return (time.perf_counter() - started_s) / (DECODE_STEPS - 1)

    def _step(self, ids: torch.Tensor, cache: DynamicCache, length: int) -> torch.Tensor:
        position = torch.full_like(ids, length)
        tokens: torch.Tensor = self.model(ids, None, position, cache, use_cache=True).logits.argmax(-1)
        return tokens

    def _filled(self, batch: int) -> DynamicCache:
        config = self.model.config
        shape = (batch, config.num_key_value_heads, sum(contexts(batch)) // batch, config.head_dim)
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            cache.update(torch.zeros(shape), torch.zeros(shape), layer)
        return cache
