"""Bounded decode latency: running requests do not wait for more than one prefill step, and bursts are still admitted fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scheduler_harness import Harness, prompt_of

from jaxserve.scheduler.turns import Turns
from jaxserve.types import ForwardMode


def test_the_rule() -> None:
    turns = Turns(None)
    assert turns.prefill_may_run(0) and turns.prefill_may_run(5)
    turns.after_prefill(has_decode_rows=False)
    assert turns.prefill_may_run(0) and not turns.prefill_may_run(1)
    turns.after_decode()
    assert turns.prefill_may_run(1)
    turns.after_prefill(has_decode_rows=True)  # a mixed step owes nothing
    assert turns.prefill_may_run(1)


@pytest.mark.parametrize(("interval", "steps"), [(0, 0), (1, 1), (3, 3)])
def test_as_many_decode_steps_as_asked(interval: int, steps: int) -> None:
    turns = Turns(interval)
    turns.after_prefill(has_decode_rows=False)
    for _ in range(steps):
        assert not turns.prefill_may_run(1)
        turns.after_decode()
    assert turns.prefill_may_run(1)


def longest_prefill_run(harness: Harness) -> int:
    """Consecutive steps without a token for the row that was running first."""
    longest = run = 0
    for mode in harness.modes[1:]:
        run = run + 1 if mode is ForwardMode.EXTEND else 0
        longest = max(longest, run)
    return longest


def run_under_load(harness: Harness) -> None:
    """One request decodes while long prompts keep coming."""
    harness.submit(prompt_of(4), max_new=60, ignore_eos=True)
    harness.turn(2)
    for i in range(10):
        harness.submit(prompt_of(100, i), max_new=2)
        harness.turn()
    harness.run()
    harness.assert_as_expected()


@pytest.mark.parametrize("args", [{}, {"enable_mixed_chunk": True}])
def test_a_running_request_waits_for_one_prefill_step_at_most(
    make_harness: Callable[..., Harness], args: dict[str, Any]
) -> None:
    harness = make_harness({"chunked_prefill_size": 32} | args, num_pages=2048)
    run_under_load(harness)
    assert longest_prefill_run(harness) <= 1
    assert max(sum(lens) for lens in harness.prefill_lens()) <= 32


def test_interval_0_restores_prefill_first(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"chunked_prefill_size": 32, "prefill_decode_interval": 0}, num_pages=2048)
    run_under_load(harness)
    assert longest_prefill_run(harness) > 3


def test_a_burst_is_admitted_in_as_few_steps_as_the_budget_allows(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"chunked_prefill_size": 1024}, max_rows=256, num_pages=16384, max_step_tokens=2048)
    for i in range(256):
        harness.submit(prompt_of(8, i), max_new=4)
    harness.run()
    harness.assert_as_expected()
    assert [len(lens) for lens in harness.prefill_lens()] == [128, 128]


def test_prompts_follow_each_other_while_nothing_decodes(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"chunked_prefill_size": 32})
    harness.submit(prompt_of(100), max_new=2, ignore_eos=True)
    harness.run()
    assert [mode.name for mode in harness.modes] == ["EXTEND"] * 4 + ["DECODE"]
