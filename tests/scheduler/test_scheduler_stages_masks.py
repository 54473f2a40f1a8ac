"""Pipelines and grammars: a constrained step waits for the results of its own rows and of nobody else's."""

from __future__ import annotations

import functools
import random

import pytest
import test_scheduler_constraints as constrained
from scheduler_harness import Harness, prompt_of
from test_scheduler_constraints import GRAMMARS, SMALL, THINKING, alone, run_until_answered
from test_scheduler_constraints import compact as compact
from test_scheduler_constraints import compiler as compiler

from jaxserve.grammar import GrammarCompiler

stages = pytest.mark.parametrize("num_stages", [2, 4])


@stages
@pytest.mark.parametrize("overlap", [True, False])
def test_constrained_steps_do_not_empty_the_pipeline(compiler: GrammarCompiler, num_stages: int, overlap: bool) -> None:
    harness = Harness(grammars=compiler, overlap=overlap, num_stages=num_stages, **{**SMALL, "max_rows": 16, "num_pages": 512})
    for i in range(2 * num_stages):
        harness.submit(prompt_of(6, i), 40, regex="[0-9]{40}")
    while not harness.steps:  # grammars compile in other threads
        harness.turn()
    harness.turn(4 * num_stages)
    kept = []
    for _ in range(2 * num_stages):
        harness.turn()
        assert harness.steps[-1].needs_masks
        kept.append(harness.scheduler.num_in_flight)
    assert set(kept) == {num_stages if overlap else num_stages - 1}
    run_until_answered(harness)
    for rid in harness.sent:
        assert harness.answer(rid).token_ids == alone(harness, compiler, rid), rid
    harness.close()


@stages
def test_free_rows_are_not_waited_for(compiler: GrammarCompiler, num_stages: int) -> None:
    """A prompt's chunks in flight, and rows without a grammar, say nothing about masks."""
    harness = Harness(
        {"chunked_prefill_size": 16},
        grammars=compiler,
        num_stages=num_stages,
        **{**SMALL, "num_pages": 512, "context_len": 400},
    )
    harness.submit(prompt_of(6), 30, regex="[0-9]{30}")
    while not harness.steps:
        harness.turn()
    harness.turn(2 * num_stages)
    harness.submit(prompt_of(300), 2)
    kept = []
    for _ in range(12):
        harness.turn()
        if harness.steps[-1].needs_masks:
            kept.append(harness.scheduler.num_in_flight)
    assert max(kept) == num_stages, kept
    run_until_answered(harness)
    for rid in harness.sent:
        assert harness.answer(rid).token_ids == alone(harness, compiler, rid), rid
    harness.close()


@stages
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_rows_that_think_are_sampled_again_when_their_answer_begins(
    compiler: GrammarCompiler, num_stages: int, num_draft_tokens: int
) -> None:
    rng = random.Random(num_draft_tokens)
    harness = Harness(
        grammars=compiler, num_stages=num_stages, num_draft_tokens=num_draft_tokens,
        **{**SMALL, "max_rows": 12, "num_pages": 512},
    )  # fmt: skip
    for i in range(30):
        grammar, thinking = rng.choice(GRAMMARS), rng.choice((None, *THINKING))
        harness.submit(
            prompt_of(5 + i % 7, i), 60, thinking=thinking, return_logprob=i % 3 == 0, **{grammar.kind: grammar.text}
        )
        harness.turn(rng.randint(0, 3))
    run_until_answered(harness)
    for rid in harness.sent:
        assert harness.answer(rid).token_ids == alone(harness, compiler, rid), rid
    harness.close()


@stages
@pytest.mark.parametrize(("overlap", "num_draft_tokens"), [(True, 1), (True, 4), (False, 1)])
def test_a_crowd(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, num_stages: int, overlap: bool, num_draft_tokens: int
) -> None:
    """That of test_scheduler_constraints: too little memory, mixed steps, thinking, samples."""
    monkeypatch.setattr(constrained, "Harness", functools.partial(Harness, num_stages=num_stages))
    constrained.test_a_crowd_of_constrained_and_free_requests(compiler, overlap, num_draft_tokens, monkeypatch)


@stages
def test_a_crowd_that_jumps(compact: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, num_stages: int) -> None:
    monkeypatch.setattr(constrained, "Harness", functools.partial(Harness, num_stages=num_stages))
    constrained.test_a_crowd_that_jumps(compact, monkeypatch)
