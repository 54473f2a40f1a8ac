"""The fake runner notices what a scheduler could do wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_runner import FakeRunner, fake_spec
from scheduler_harness import Harness, prompt_of

from jaxserve.runner import PageUpdates, RowState, StepInput, launch
from jaxserve.types import ForwardMode, SamplingParams


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


FIVE_PAGES = PageUpdates.of(rows=ints(2, 2, 2, 2, 2), index=ints(0, 1, 2, 3, 4), pages=ints(1, 2, 3, 4, 5))


def row_state(*prompt: int) -> RowState:
    return RowState(
        row=2,
        sampling=SamplingParams(temperature=0),
        seed=0,
        prompt_len=len(prompt),
        stop_token_ids=ints(),
        output_ids=ints(),
        token_ids=ints(*prompt),
    )


def first_step(**changes: Any) -> StepInput:
    """Row 2 prefills three tokens into pages 7, 8, 9."""
    values: dict[str, Any] = {
        "mode": ForwardMode.EXTEND,
        "rows": ints(2),
        "seq_lens": ints(3),
        "extend_lens": ints(3),
        "num_decode_rows": 0,
        "input_ids": ints(5, 6, 7),
        "sample": np.array([True]),
        "page_updates": PageUpdates.of(rows=ints(2, 2, 2), index=ints(0, 1, 2), pages=ints(7, 8, 9)),
        "new_rows": [row_state(5, 6, 7)],
        "needs_sampling": False,
        "needs_adjusting": False,
        "needs_logprobs": False,
        "needs_top_logprobs": False,
    }
    return StepInput(**(values | changes))


def decode_step(**changes: Any) -> StepInput:
    values = {
        "mode": ForwardMode.DECODE,
        "seq_lens": ints(4),
        "extend_lens": ints(1),
        "num_decode_rows": 1,
        "input_ids": ints(),
        "page_updates": PageUpdates.of(rows=ints(2), index=ints(3), pages=ints(1)),
        "new_rows": [],
    }
    return first_step(**(values | changes))


@pytest.fixture
def runner() -> Iterator[FakeRunner]:
    runner = FakeRunner(fake_spec())
    yield runner
    runner.close()


def run(runner: FakeRunner, *steps: StepInput) -> list[int]:
    handles = [launch(runner, step) for step in steps]
    return [int(runner.fetch(handle).token_ids[0, 0]) for handle in handles]


def test_tokens_are_those_of_the_oracle(runner: FakeRunner) -> None:
    assert run(runner, first_step(), decode_step()) == runner.expected_tokens([5, 6, 7], 2, stop_ids=())


def test_tokens_depend_on_everything() -> None:
    runner = FakeRunner(fake_spec(vocab_size=1 << 30))
    variants = [([5, 6, 7], 0), ([6, 5, 7], 0), ([5, 6], 0), ([5, 6, 7], 1), ([5, 6, 8], 0)]
    tokens = {runner.expected_tokens(prompt, 1, seed=seed)[0] for prompt, seed in variants}
    runner.close()
    assert len(tokens) == len(variants)


@pytest.mark.parametrize(
    ("make_steps", "message"),
    [
        (lambda: [decode_step()], "no token from its step before"),
        (lambda: [first_step(), decode_step(page_updates=PageUpdates.of(ints(), ints(), ints()))], "without pages"),
        (lambda: [first_step(), decode_step(seq_lens=ints(5))], "continues at 4 but holds 3"),
        (lambda: [first_step(seq_lens=ints(5), new_rows=[row_state(1, 2, 5, 6, 7)])], "may write tokens 2..5 without pages"),
        (
            lambda: [first_step(seq_lens=ints(5), new_rows=[row_state(1, 2, 5, 6, 7)], page_updates=FIVE_PAGES)],
            "reads slots that were never written",
        ),
        (lambda: [first_step(input_ids=ints(5, 6))], "do not match the extend lengths"),
        (lambda: [first_step(mode=ForwardMode.MIXED)], "MIXED with 0 decode rows of 1"),
        (lambda: [first_step(rows=ints(16))], "rows out of range"),
        (lambda: [first_step(rows=np.array([2]))], "rows is int64"),
        (lambda: [first_step(page_updates=PageUpdates.of(ints(2), ints(0), ints(512)))], "pages 512..512 of 512"),
        (lambda: [first_step(sample=np.array([False])), decode_step()], "no token from its step before"),
    ],
)
def test_mistakes(runner: FakeRunner, make_steps: Callable[[], list[StepInput]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run(runner, *make_steps())


def test_other_outputs_than_before_a_retraction(runner: FakeRunner) -> None:
    step = first_step()
    state = dataclasses.replace(step.new_rows[0], prompt_len=2, output_ids=ints(99))
    with pytest.raises(AssertionError, match="resumes with other outputs"):
        run(runner, dataclasses.replace(step, new_rows=[state]))


def test_an_input_changed_after_launch_is_seen() -> None:
    runner = FakeRunner(fake_spec(), step_delay_s=0.05)
    step = first_step()
    step.new_rows[0].token_ids[0] = 50
    handle = launch(runner, step)
    step.input_ids[0] = 50
    token = int(runner.fetch(handle).token_ids[0, 0])
    assert token == runner.expected_tokens([50, 6, 7], 1)[0] != runner.expected_tokens([5, 6, 7], 1)[0]
    runner.close()


def test_a_scheduler_that_frees_too_early_is_caught(make_harness: Callable[..., Harness]) -> None:
    """Two rows on the same page: the tokens are wrong. This is what the random workloads rely on."""
    harness = make_harness()
    for i in range(2):
        harness.submit(prompt_of(5, i), 20, ignore_eos=True)
    harness.turn(3)
    cache = harness.scheduler.cache.shards[0]
    table, rows = cache.req_to_token.tables[0], harness.steps[0].rows
    table.write(int(rows[0]), 2, table.entries[int(rows[1]), 2:3])
    harness.turn(3)
    harness.abort(abort_all=True)
    harness.turn(2)
    got = [harness.answer(rid).token_ids for rid in ("r0", "r1")]
    expected = [harness.expected(rid) for rid in ("r0", "r1")]
    assert got[0] != expected[0][: len(got[0])] and got[1] == expected[1][: len(got[1])]
