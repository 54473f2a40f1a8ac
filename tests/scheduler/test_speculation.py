"""Speculative decoding with a real model: the same tokens as without, whatever the cache, the chunks and the loop."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from scheduler_harness import Answer, Harness

from jaxserve.config import ServerArgs
from jaxserve.executor import BuiltRunner, build_runner
from jaxserve.scheduler import prefill_adder

NUM_REQUESTS = 200
COMMON: dict[str, Any] = {
    "context_length": 128,
    "max_running_requests": 8,
    "decode_row_buckets": (8,),
    "prefill_token_buckets": (64,),
    "random_seed": 1,
}
NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM"}
RUNNERS: dict[str, dict[str, Any]] = {  # compiling them is most of the time
    "plain": {"page_size": 16, "max_total_tokens": 2048, "chunked_prefill_size": 64},
    "small pages": {
        **NGRAM, "page_size": 1, "max_total_tokens": 300, "chunked_prefill_size": 16, "speculative_num_draft_tokens": 3,
    },
    "large pages": {
        **NGRAM, "page_size": 16, "max_total_tokens": 1024, "chunked_prefill_size": -1, "max_prefill_tokens": 64,
        "speculative_num_draft_tokens": 6, "speculative_ngram_min_match_window_size": 2,
    },
}  # fmt: skip
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {  # a runner, and options of the scheduler before it
    "off": ("plain", {}),
    "radix, chunks, retraction": ("small pages", {"schedule_conservativeness": 0.0}),
    "mixed, no radix": (
        "large pages", {"chunked_prefill_size": 32, "enable_mixed_chunk": True, "disable_radix_cache": True},
    ),
    "plain loop": ("large pages", {"disable_overlap_schedule": True}),
}  # fmt: skip


def submit_requests(harness: Harness) -> None:
    """Texts that repeat themselves, in part shared; two thirds greedy, some with stops, penalties or logprobs."""
    rng = random.Random(5)
    shared = [rng.randrange(1, 250) for _ in range(40)]
    for i in range(NUM_REQUESTS):
        part = [rng.randrange(1, 250) for _ in range(rng.randint(2, 10))]
        prompt = shared[: rng.choice([0, 20, 40])] + part * rng.randint(1, 4)
        sampling: dict[str, Any] = {"ignore_eos": True}
        if i % 3 == 0:
            sampling |= {"temperature": 0.7, "top_p": 0.9, "sampling_seed": i}
        if i % 5 == 0:
            sampling |= {"frequency_penalty": 0.4, "min_new_tokens": 3}
        if i % 7 == 0:
            sampling["stop_token_ids"] = [rng.randrange(250) for _ in range(20)]
        harness.submit(prompt, rng.choice([1, 8, 40]), return_logprob=i % 4 == 0, top_logprobs_num=i % 3, **sampling)


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    cache, model = str(tmp_path_factory.mktemp("compiled")), str(checkpoint("qwen3"))
    built: dict[str, BuiltRunner] = {}
    found = {}
    for name, (runner, options) in SETTINGS.items():
        if runner not in built:
            args = ServerArgs(model_path=model, compilation_cache_dir=cache, **COMMON, **RUNNERS[runner])
            built[runner] = build_runner(args, show_progress=False)
        args = dataclasses.replace(built[runner].args, **options)
        harness = Harness(runner=built[runner].runner, server_args=args, overlap=not args.disable_overlap_schedule)
        submit_requests(harness)
        with mock.patch.object(prefill_adder, "CLIP_MAX_NEW_TOKENS", 2):  # admits more than fits in the end
            harness.run(20_000)
        found[name] = [harness.answer(rid) for rid in harness.sent]
        state = harness.scheduler.internal_state()
        assert state["runner"]["compiles_after_ready_total"] == 0
        assert name == "off" or state["avg_spec_accept_length"] > 1.05, state["avg_spec_accept_length"]
        hard_cases = state["num_retractions"], state["cached_tokens"]
        assert name != "radix, chunks, retraction" or all(hard_cases), hard_cases
    return found


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "off"])
def test_the_same_tokens_as_without(answers: dict[str, list[Answer]], name: str) -> None:
    for plain, speculative in zip(answers["off"], answers[name], strict=True):
        assert speculative.token_ids == plain.token_ids
        assert speculative.finish == plain.finish
        for part in ("logprobs", "top_logprobs"):
            values = [
                np.concatenate([getattr(one, part) for one in answer.logprobs]) if answer.logprobs else np.zeros(0)
                for answer in (plain, speculative)
                if not answer.logprobs or getattr(answer.logprobs[0], part) is not None
            ]
            if values:
                np.testing.assert_allclose(values[0], values[1], atol=1e-4)


def test_what_the_reply_says_of_it(answers: dict[str, list[Answer]]) -> None:
    for answer in answers["plain loop"]:
        times = answer.times
        assert times is not None
        assert times.proposed_drafts == 5 * times.verify_steps  # of 6 tokens verified, one is certain
        assert 0 <= times.accepted_drafts <= times.proposed_drafts
        # Each prefill gives one token as well.
        assert answer.completion_tokens <= 1 + times.num_retractions + times.verify_steps + times.accepted_drafts
    assert all(answer.times is not None and answer.times.verify_steps == 0 for answer in answers["off"])
