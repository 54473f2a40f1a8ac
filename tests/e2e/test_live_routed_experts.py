"""The experts of each token, of an Engine on two devices, against the routers of Transformers."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from routers import assert_same_experts

from jaxserve import Engine
from jaxserve.server.requests import RequestError

NUM_LAYERS, PER_TOKEN = 2, 3
SAMPLING = {"temperature": 1.0, "max_new_tokens": 20, "ignore_eos": True, "sampling_seed": 1}
PROMPTS = [np.random.default_rng(length).integers(3, 300, length).tolist() for length in (40, 3, 17)]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3-moe")


@pytest.fixture(scope="module")
def engine(model: Path, compilation_cache: str) -> Iterator[Engine]:
    with Engine(
        str(model),
        tp_size=2,
        page_size=16,
        max_running_requests=4,
        max_total_tokens=1024,
        context_length=256,
        chunked_prefill_size=32,
        prefill_token_buckets=(64,),
        decode_row_buckets=(4,),
        grammar_backend="none",
        compilation_cache_dir=compilation_cache,
        enable_return_routed_experts=True,
        log_level="warning",
    ) as engine:
        yield engine


def experts_of(reply: dict[str, Any]) -> np.ndarray:
    raw = base64.b64decode(reply["meta_info"]["routed_experts"])
    return np.frombuffer(raw, "<i4").reshape(-1, NUM_LAYERS, PER_TOKEN)


def check(model: Path, replies: list[dict[str, Any]], prompts: list[list[int]], starts: list[int]) -> None:
    for reply, start in zip(replies, starts, strict=True):
        meta = reply["meta_info"]
        assert len(experts_of(reply)) == meta["prompt_tokens"] + meta["completion_tokens"] - 1 - start
    sequences = [prompt + reply["output_ids"] for prompt, reply in zip(prompts, replies, strict=True)]
    assert_same_experts(model, sequences, starts, [experts_of(reply) for reply in replies])


def test_batches_streams_and_what_is_cached(engine: Engine, model: Path) -> None:
    starts = [0, 3, 16]
    asked: dict[str, Any] = {"input_ids": PROMPTS, "sampling_params": SAMPLING, "return_routed_experts": True}
    replies: Any = engine.generate(**asked, routed_experts_start_len=starts)
    check(model, replies, PROMPTS, starts)
    again: Any = engine.generate(**asked)  # their prompts are cached, and computed again
    check(model, again, PROMPTS, [0, 0, 0])

    one = {**asked, "input_ids": PROMPTS[0]}
    engine.slow_down(0.05)  # else a reader that gets no time to read finds all of it in the last event
    *before, last = engine.generate(**one, stream=True)
    engine.slow_down(0.0)
    assert before and not any("routed_experts" in event["meta_info"] for event in before)
    check(model, [last], PROMPTS[:1], [0])
    samples: Any = asyncio.run(engine.async_generate(**one | {"sampling_params": {**SAMPLING, "n": 3}}))
    check(model, samples, PROMPTS[:1] * 3, [0, 0, 0])
    only_some: Any = engine.generate(**asked | {"return_routed_experts": [False, True, False]})
    assert ["routed_experts" in reply["meta_info"] for reply in only_some] == [False, True, False]
    state = engine.get_server_info()["internal_states"][0]
    assert state["runner"]["compiles_after_ready_total"] == 0


def test_rollouts(engine: Engine, model: Path) -> None:
    rollouts = engine.rollout(input_ids=PROMPTS, sampling_params=SAMPLING, n=2, routed_experts=True)
    assert rollouts.routed_experts is not None
    sequences = [
        PROMPTS[row // 2] + tokens[:length].tolist()
        for row, (tokens, length) in enumerate(zip(rollouts.tokens, rollouts.lengths.tolist(), strict=True))
    ]
    assert_same_experts(model, sequences, [0] * 6, rollouts.routed_experts)
    assert engine.rollout(input_ids=PROMPTS, sampling_params=SAMPLING).routed_experts is None


def test_starts_outside_of_the_prompt(engine: Engine) -> None:
    for start, says in (
        (-1, r"routed_experts_start_len must be a place in the prompt, got -1\."),
        (4, r"routed_experts_start_len may be at most the prompt's 3 tokens, got 4\."),
    ):
        with pytest.raises(RequestError, match=says) as caught:
            engine.generate(input_ids=[5, 6, 7], return_routed_experts=True, routed_experts_start_len=start)
        assert caught.value.status_code == 400
