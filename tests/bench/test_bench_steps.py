"""Steps driven as by a scheduler: on the fake runner, which checks each of them, and how prompts are cut into steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jaxserve.bench.steps import Chunk, StepDriver, prefill_steps
from jaxserve.runner import KVGroup

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_runner import FakeRunner, fake_spec


def test_prompts_are_cut_at_pages() -> None:
    steps = prefill_steps([10, 5, 12], max_step_tokens=12, page_size=4)
    cut = [[(chunk.row, chunk.start, chunk.end) for chunk in chunks] for chunks in steps]
    assert cut == [[(0, 0, 10)], [(1, 0, 5), (2, 0, 4)], [(2, 4, 12)]]
    assert prefill_steps([3], 12, 4) == [[Chunk(0, 0, 3, 3)]]


@pytest.mark.parametrize(("page_size", "num_shards"), [(1, 1), (8, 1), (8, 2)])
def test_what_is_launched_is_what_a_scheduler_would_launch(page_size: int, num_shards: int) -> None:
    groups = (KVGroup(512 // page_size), KVGroup(256 // page_size, window=16))
    runner = FakeRunner(fake_spec(page_size=page_size, kv_groups=groups, max_step_tokens=32, num_shards=num_shards))
    driver = StepDriver(runner)
    try:
        driver.enter(3, 70)
        assert driver.prefill([64] * 3) > 0
        assert len(driver.decode([64] * 3, 5)) == 5
        assert [step.num_tokens for step in runner.steps] == [1] * 3 + [32] * 6 + [3] * 5
        assert runner.steps[-1].rows.tolist() == ([0, 1, 2] if num_shards == 1 else [0, 8, 1])
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("rows", "tokens", "words"),
    [(17, 1, "--max-running-requests, which is 16"), (1, 257, "context length, which is 256"), (3, 200, "600 tokens of KV")],
)
def test_what_there_is_no_room_for(rows: int, tokens: int, words: str) -> None:
    runner = FakeRunner(fake_spec())
    try:
        with pytest.raises(ValueError, match=words):
            StepDriver(runner).check(rows, tokens)
    finally:
        runner.close()
