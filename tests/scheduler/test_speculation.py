"""The scheduler before a real model, with and without drafts: the same tokens, whatever the cache, the chunks and the loop; and
constrained outputs that are what they must be."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from grammar_cases import CASES
from scheduler_harness import Answer, Harness
from tokenizers import Tokenizer

from jaxserve.config import ServerArgs
from jaxserve.executor import BuiltRunner, build_runner
from jaxserve.grammar import GrammarCompiler
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


RunnerOf = Callable[[str], BuiltRunner]


@pytest.fixture(scope="module")
def runner_of(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> RunnerOf:
    """`runner_of(name)`: one of RUNNERS, built on first use."""
    cache, model = str(tmp_path_factory.mktemp("compiled")), str(checkpoint("qwen3"))

    @functools.cache
    def get(name: str) -> BuiltRunner:
        args = ServerArgs(model_path=model, compilation_cache_dir=cache, **COMMON, **RUNNERS[name])
        return build_runner(args, show_progress=False)

    return get


def run(built: BuiltRunner, options: dict[str, Any], submit: Callable[[Harness], None], **how: Any) -> Harness:
    """A scheduler of its own before the runner, until everything is answered; nothing may compile meanwhile."""
    args = dataclasses.replace(built.args, **options)
    harness = Harness(runner=built.runner, server_args=args, overlap=not args.disable_overlap_schedule, **how)
    compiles = built.runner.internal_state()["compiles_total"]
    submit(harness)
    with mock.patch.object(prefill_adder, "CLIP_MAX_NEW_TOKENS", 2):  # admits more than fits in the end
        harness.run(20_000)
    assert built.runner.internal_state()["compiles_total"] == compiles
    return harness


@pytest.fixture(scope="module")
def answers(runner_of: RunnerOf) -> dict[str, list[Answer]]:
    found = {}
    for name, (runner, options) in SETTINGS.items():
        harness = run(runner_of(runner), options, submit_requests)
        found[name] = [harness.answer(rid) for rid in harness.sent]
        state = harness.scheduler.internal_state()
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


def submit_constrained(harness: Harness) -> None:
    """Every grammar once, so hot that the model has no say, and a free request now and then."""
    for i, case in enumerate(CASES):
        how = {"temperature": 1.5, "sampling_seed": i}
        harness.submit([5, 6 + i], 120, rid=case.name, **how, **{case.grammar.kind: case.grammar.text})
        if i % 4 == 0:
            harness.submit([7, 6 + i], 30, ignore_eos=True, **how)


@pytest.mark.parametrize("name", ["plain", "large pages"])
def test_what_a_hot_model_writes_to_a_grammar_is_valid(
    runner_of: RunnerOf, checkpoint: Callable[[str], Path], name: str
) -> None:
    """Judged by parsers that know nothing of llguidance, without and with drafts."""
    built, tokenizer = runner_of(name), Tokenizer.from_file(str(checkpoint("qwen3") / "tokenizer.json"))
    spec = built.runner.spec
    compiler = GrammarCompiler(tokenizer.to_str(), spec.vocab_size, spec.eos_token_ids)
    try:
        for pending in [compiler.submit(case.grammar) for case in CASES]:
            pending.result()
        harness = run(built, {}, submit_constrained, grammars=compiler)
    finally:
        compiler.close()
    complete = [case for case in CASES if harness.answer(case.name).finish.type == "stop"]
    for case in complete:
        ids = [token for token in harness.answer(case.name).token_ids if token not in spec.eos_token_ids]
        case.check(tokenizer.decode(ids, skip_special_tokens=False))
    assert len(complete) >= 40, sorted({case.name for case in CASES} - {case.name for case in complete})
