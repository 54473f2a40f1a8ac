"""Tokens and logprobs of a live server against Transformers, over a covering set of models and server options.

Every model family, rope kind and head layout of `checkpoints.CASES` is served once; page size, chunking, mixed chunks,
overlap, tensor parallelism and the radix cache vary with it. The oracle runs one forward pass over prompt and answer: the
answer is greedy exactly if each of its tokens is the argmax at its position.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import load_model
from live_server import LiveServer, running

OUTPUT_LEN = 64
NUM_TOP = 3
NUM_CLIENTS = 32


@dataclasses.dataclass(frozen=True)
class Served:
    """A checkpoint and the options it is served with."""

    case: str
    page_size: int
    chunk: int
    tp: int = 1
    mixed: bool = False
    overlap: bool = True
    radix: bool = True
    buckets: tuple[str, str] = ("32", "512")  # of decode rows and prefill tokens; compiling them is most of a test's time

    @property
    def options(self) -> list[str]:
        options = ["--page-size", str(self.page_size), "--chunked-prefill-size", str(self.chunk), "--tp-size", str(self.tp)]
        options += ["--decode-row-buckets", self.buckets[0], "--prefill-token-buckets", self.buckets[1]]
        options += ["--enable-mixed-chunk"] * self.mixed
        options += ["--disable-overlap-schedule"] * (not self.overlap)
        options += ["--disable-radix-cache"] * (not self.radix)
        return options

    def __str__(self) -> str:
        flags = [f"page{self.page_size}", f"chunk{self.chunk}", f"tp{self.tp}"]
        flags += ["mixed"] * self.mixed + ["plain"] * (not self.overlap) + ["noradix"] * (not self.radix)
        flags += ["buckets"] * (self.buckets == SEVERAL)
        return "-".join([self.case, *flags])


SEVERAL = ("4,32", "32,512")
COVERING_SET = [
    Served("llama", page_size=1, chunk=32, buckets=SEVERAL),
    Served("llama-biases", page_size=64, chunk=-1, tp=4),
    Served("llama-linear", page_size=16, chunk=32, mixed=True, overlap=False),
    Served("llama-dynamic", page_size=1, chunk=16, mixed=True),
    Served("llama-llama3", page_size=16, chunk=32, tp=2, mixed=True),
    Served("llama-yarn", page_size=64, chunk=64, overlap=False),
    Served("mistral", page_size=16, chunk=-1, tp=2, overlap=False, buckets=SEVERAL),
    Served("mistral-full", page_size=1, chunk=32, tp=4, mixed=True),
    Served("qwen2", page_size=64, chunk=64, mixed=True, radix=False),
    Served("qwen2-windows", page_size=1, chunk=48, mixed=True, overlap=False, buckets=SEVERAL),
    Served("qwen2-yarn", page_size=16, chunk=64, tp=2),
    Served("qwen3", page_size=16, chunk=32, tp=4, mixed=True, overlap=False, buckets=SEVERAL),
    Served("qwen3-moe", page_size=16, chunk=32, tp=4, mixed=True, buckets=SEVERAL),
    Served("qwen3-moe-some-layers", page_size=1, chunk=48, radix=False),
    Served("qwen3-biases", page_size=64, chunk=64, tp=1),
    Served("gemma2", page_size=16, chunk=32, mixed=True, buckets=SEVERAL),
    Served("gemma2-uncapped", page_size=64, chunk=64, tp=2, overlap=False),
    Served("gemma3", page_size=1, chunk=48, tp=2, mixed=True),
    Served("gemma3-images", page_size=16, chunk=-1, overlap=False),
]


def prompts_for(vocab_size: int, longest: int) -> list[list[int]]:
    """NUM_CLIENTS prompts: single tokens to several chunks, page borders, shared prefixes, twins."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(3, vocab_size, min(count, longest)).tolist()

    prompts = [tokens(n) for n in (1, 2, 5, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 129)]
    shared = tokens(80)
    prompts += [(shared[:n] + tokens(7))[:longest] for n in (20, 40, 64, 72, 80)]
    prompts += [list(prompt) for prompt in prompts]
    return prompts[:NUM_CLIENTS]


class Oracle:
    """Transformers on the CPU in float32."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder)
        self.config = self.model.config.get_text_config()
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), V]: of the token that follows each position."""
        key = tuple(tokens)
        if key not in self._known:
            with torch.inference_mode():
                self._known[key] = torch.log_softmax(self.model(torch.tensor([tokens])).logits[0].float(), dim=-1)
        return self._known[key]


def ask(server: LiveServer, prompt: list[int] | list[list[int]], output_len: int, *, ignore_eos: bool = True) -> Any:
    """The reply to a prompt, or a list of replies to a list of prompts."""
    return server.generate(
        input_ids=prompt,
        sampling_params={"temperature": 0, "max_new_tokens": output_len, "ignore_eos": ignore_eos},
        return_logprob=True,
        top_logprobs_num=NUM_TOP,
    )


def check(oracle: Oracle, prompt: list[int], output_len: int, reply: dict[str, Any]) -> None:
    answer, meta = reply["output_ids"], reply["meta_info"]
    assert len(answer) == output_len
    expected = oracle.logprobs(prompt + answer)[len(prompt) - 1 : -1]
    best = expected.argmax(dim=-1).tolist()
    assert answer == best, (
        f"prompt of {len(prompt)}: token {next(i for i in range(output_len) if answer[i] != best[i])} differs"
    )
    ours = np.asarray([logprob for logprob, _, _ in meta["output_token_logprobs"]])
    np.testing.assert_allclose(ours, expected.max(dim=-1).values, atol=1e-3)
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer
    ours_top = np.asarray([[logprob for logprob, _, _ in top] for top in meta["output_top_logprobs"]])
    np.testing.assert_allclose(ours_top, expected.topk(NUM_TOP, dim=-1).values, atol=1e-3)


@pytest.mark.parametrize("served", COVERING_SET, ids=str)
def test_live_tokens_equal_those_of_transformers(
    served: Served, checkpoint: Callable[[str], Path], tmp_path: Path, compilation_cache: str
) -> None:
    oracle = Oracle(checkpoint(served.case))
    context_len = min(oracle.config.max_position_embeddings, 256)
    output_len = min(OUTPUT_LEN, context_len // 2)
    prompts = prompts_for(oracle.config.vocab_size, context_len - output_len)
    options = ["--model-path", str(checkpoint(served.case)), "--context-length", str(context_len)]
    options += ["--max-running-requests", str(NUM_CLIENTS), "--max-total-tokens", "16384", *served.options]
    options += ["--max-prefill-tokens", "512", "--compilation-cache-dir", compilation_cache]
    with running(tmp_path / "server.log", *options) as server, concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for cached in (False, True):
            replies = list(pool.map(lambda prompt: ask(server, prompt, output_len), prompts))
            for prompt, reply in zip(prompts, replies, strict=True):
                check(oracle, prompt, output_len, reply)
                hit = reply["meta_info"]["cached_tokens"]
                assert hit <= len(prompt) - 1
                if cached and served.radix and len(prompt) > served.page_size:
                    assert hit == (len(prompt) - 1) // served.page_size * served.page_size
                if not served.radix:
                    assert hit == 0
        for prompt in prompts[:3]:
            check(oracle, prompt, output_len, ask(server, prompt, output_len))
