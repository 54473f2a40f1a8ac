"""When the stages of a timed device end what was launched, by a clock of the test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.timed_device import TimedRunner, environment, step_times, timed_spec
from jaxserve.bench.simulate import LinearStepTimes
from jaxserve.bench.simulate.replica import VirtualClock
from jaxserve.config import ServerArgs
from jaxserve.runner import ForwardMode, PageUpdates, StepInput


def decode(*rows: int) -> StepInput:
    ones, nothing = np.ones(len(rows), np.int32), np.zeros(0, np.int32)
    return StepInput(
        mode=ForwardMode.DECODE,
        rows=np.array(rows, np.int32),
        seq_lens=10 * ones,
        extend_lens=ones,
        num_decode_rows=len(rows),
        input_ids=nothing,
        sample=ones.astype(bool),
        page_updates=PageUpdates.of(nothing, nothing, nothing),
        new_rows=[],
        needs_sampling=False,
        needs_adjusting=False,
        needs_logprobs=False,
        needs_top_logprobs=False,
    )


@pytest.mark.parametrize(
    ("stages_s", "launched", "ends_s"),
    [
        ([1.0], [(5.0, 0), (5.0, 1), (9.0, 0)], [6.0, 7.0, 10.0]),  # one device: a step after the other
        ([1.0, 1.0], [(5.0, 0), (5.0, 1), (5.0, 2)], [7.0, 8.0, 9.0]),  # two stages: a step is in each
        (
            [1.0, 1.0],
            [(5.0, 0), (5.0, 0), (5.0, 1)],
            [7.0, 9.0, 10.0],
        ),  # a row's next step waits for its token, others behind it
        ([1.0, 3.0], [(5.0, 0), (5.0, 1), (6.0, 2)], [9.0, 12.0, 15.0]),  # the slowest stage decides
    ],
)
def test_a_stage_begins_when_it_is_free_and_has_what_the_one_before_hands_on(
    stages_s: Sequence[float], launched: Sequence[tuple[float, int]], ends_s: Sequence[float]
) -> None:
    clock, spec = VirtualClock(), timed_spec(ServerArgs(model_path="timed", pp_size=len(stages_s)), LinearStepTimes())
    runner, handles = TimedRunner(spec, lambda step: stages_s, clock), []
    for at_s, row in launched:
        clock.now_s = at_s
        handles.append(runner.forward(decode(row)))
    assert [handle.ends_s for handle in handles] == pytest.approx(ends_s)
    clock.now_s = ends_s[-1]
    assert [runner.fetch(handle).num_tokens.tolist() for handle in handles] == [[1]] * len(launched), "none is waited for now"
    busy_s = sum(stages_s) / len(stages_s) * len(launched)
    assert runner.internal_state()["busy_s"] == pytest.approx(busy_s)
    assert spec.num_stages == len(stages_s)


def test_times_are_the_environments() -> None:
    times = LinearStepTimes(step_s=0.02, prefill_token_s=2e-4, decode_row_s=3e-3, pair_s=1.6e-7)
    assert step_times(environment(times)) == times
    assert step_times({}) == LinearStepTimes(step_s=0.004, prefill_token_s=0.0, decode_row_s=0.0)
