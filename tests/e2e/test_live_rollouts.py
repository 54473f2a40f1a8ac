"""Engine.rollout on a model: what generate gives, each prompt computed once for its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import Engine

NUM_SAMPLES, NUM_TOKENS, PAGE = 32, 8, 16


@pytest.fixture(scope="module", params=[False, True], ids=["processes", "in_process"])
def engine(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], compilation_cache: str) -> Iterator[Engine]:
    with Engine(
        str(checkpoint("qwen3")),
        in_process=request.param,
        page_size=PAGE,
        max_running_requests=NUM_SAMPLES,
        max_total_tokens=4096,
        chunked_prefill_size=128,
        decode_row_buckets=(NUM_SAMPLES,),
        compilation_cache_dir=compilation_cache,
        warmup="full",
    ) as engine:
        yield engine


def state(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    return found


def test_rollouts_are_what_generate_gives(engine: Engine) -> None:
    prompts = ["The quick brown fox", "A server", "def add(left, right):"]
    sampling = {"temperature": 1.0, "max_new_tokens": 70, "sampling_seed": 3}
    replies: Any = engine.generate(prompts, {**sampling, "n": 4}, return_logprob=True)
    rollouts = engine.rollout(prompts, sampling, n=4, max_len=80)
    assert rollouts.tokens.shape == (12, 80) and rollouts.logprobs is not None
    for row, reply in enumerate(replies):
        length = int(rollouts.lengths[row])
        assert rollouts.tokens[row, :length].tolist() == reply["output_ids"]
        drawn = [logprob for logprob, _, _ in reply["meta_info"]["output_token_logprobs"]]
        np.testing.assert_allclose(rollouts.logprobs[row, :length], drawn, atol=1e-4)
        assert rollouts.finish_reasons[row] == reply["meta_info"]["finish_reason"]["type"]
        assert rollouts.texts[row] == reply["text"]
    for prompt, text in enumerate(prompts):
        ids = rollouts.prompt_tokens[prompt, -int(rollouts.prompt_lengths[prompt]) :]
        assert ids.tolist() == engine.tokenizer.encode(text)


@pytest.mark.parametrize("prompt_len", [400, 397, 20])
def test_a_prompt_is_computed_once_for_its_samples(engine: Engine, prompt_len: int) -> None:
    """But for the page that each sample goes on in, or, of short ones, for a page or two."""
    ids = np.random.default_rng(prompt_len).integers(3, 290, prompt_len)
    sampling = {"temperature": 1.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True, "sampling_seed": 1}
    before = state(engine)
    rollouts = engine.rollout(input_ids=ids, sampling_params=sampling, n=NUM_SAMPLES)
    computed = state(engine)["prefill_tokens"] - before["prefill_tokens"]
    whole_pages = (prompt_len - 1) // PAGE * PAGE
    at_best = prompt_len + (NUM_SAMPLES - 1) * (prompt_len - whole_pages)
    assert at_best <= computed <= at_best + (PAGE if prompt_len < 32 else 0)
    assert len({tuple(row) for row in rollouts.tokens.tolist()}) > NUM_SAMPLES // 2
