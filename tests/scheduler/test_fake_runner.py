"""The fake runner notices what a scheduler could do wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_runner import FakeRunner, fake_spec
from fake_vectors import fake_vectors
from scheduler_harness import Harness, prompt_of

from jaxserve.runner import PageUpdates, PoolQuery, RowState, StepInput, Vectors, launch
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


WHOLE, LAST = fake_vectors(needs_whole=True), fake_vectors()


def pools(first_slot: int, count: int, start: int, *, ends: bool, rows: tuple[int, ...] = (2,)) -> PoolQuery:
    parts = len(rows)
    return PoolQuery(
        rows=ints(*rows),
        first_slots=np.full(parts, first_slot, np.int32),
        counts=np.full(parts, count, np.int32),
        starts=np.full(parts, start, np.int32),
        ends=np.full(parts, ends),
    )


def text_step(query: PoolQuery | None, start: int = 0) -> StepInput:
    """Of a text of five tokens, row 2 computes the first three, or those from there on."""
    ids = [5, 6, 7, 8, 9]
    end = 5 if start else 3
    return first_step(
        seq_lens=ints(end),
        extend_lens=ints(end - start),
        input_ids=ints(*ids[start:end]),
        sample=np.array([False]),
        page_updates=PageUpdates.of(rows=ints(2, 2, 2, 2, 2), index=ints(0, 1, 2, 3, 4), pages=ints(1, 2, 3, 4, 5)),
        new_rows=[] if start else [dataclasses.replace(row_state(*ids), sampling=SamplingParams(max_new_tokens=0))],
        pool_query=query,
    )


@pytest.mark.parametrize(
    ("vectors", "queries", "vector"),
    [
        (WHOLE, (pools(0, 3, 0, ends=False), pools(0, 2, 3, ends=True)), [6 + 14 + 24 + 36 + 50, 5, 5, 9]),
        (LAST, (None, pools(1, 1, 4, ends=True)), [50, 1, 9, 9]),
    ],
)
def test_vectors_are_what_one_computes_by_hand(
    vectors: Vectors, queries: tuple[PoolQuery | None, ...], vector: list[int]
) -> None:
    runner = FakeRunner(fake_spec(vectors=vectors))
    first, second = (launch(runner, text_step(query, start)) for query, start in zip(queries, (0, 3), strict=True))
    begun = runner.fetch(first).pooled
    assert begun is None or not len(begun)
    found = runner.fetch(second).pooled
    assert found is not None
    assert found.tolist() == [[*vector, *runner.expected_tokens([5, 6, 7, 8, 9], 1)]]
    assert found.tolist() == runner.expected_vectors([5, 6, 7, 8, 9])
    runner.close()


@pytest.mark.parametrize(
    ("vectors", "queries", "message"),
    [
        (None, [pools(0, 3, 0, ends=False)], "that the model does not make"),
        (WHOLE, [pools(0, 2, 0, ends=False)], "slots 0 \\+ 2 of row 2, not 0..3"),
        (WHOLE, [pools(0, 4, 0, ends=False)], "slots 0 \\+ 4 of row 2, not 0..3"),
        (WHOLE, [pools(1, 2, 1, ends=False)], "leaves out 1 tokens"),
        (WHOLE, [pools(0, 3, 1, ends=False)], "begins at 0, not at 1"),
        (WHOLE, [pools(0, 3, 0, ends=True)], "ends=True at 3"),
        (WHOLE, [pools(0, 3, 0, ends=False, rows=(2, 2))], "rows are not distinct"),
        (WHOLE, [pools(0, 3, 0, ends=False, rows=(3,))], "row 3 extends nothing"),
        (WHOLE, [None, pools(0, 2, 3, ends=True)], "goes on at 3, and nothing of its text has come"),
        (WHOLE, [pools(0, 3, 0, ends=False), pools(0, 2, 3, ends=False)], "ends=False at 5"),
        (LAST, [pools(2, 1, 2, ends=False)], "of which one matters"),
        (LAST, [None, pools(0, 2, 3, ends=True)], "gives 2 tokens of which one matters"),
    ],
)
def test_mistakes_about_vectors(vectors: Vectors | None, queries: list[PoolQuery | None], message: str) -> None:
    runner = FakeRunner(fake_spec(vectors=vectors))
    with pytest.raises(AssertionError, match=message):
        run(runner, *(text_step(query, start) for query, start in zip(queries, (0, 3), strict=False)))
    runner.close()


def test_a_model_without_text_samples_nothing() -> None:
    runner = FakeRunner(fake_spec(vectors=WHOLE, generates=False))
    with pytest.raises(AssertionError, match="is to sample"):
        run(runner, first_step())
    runner.close()


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
