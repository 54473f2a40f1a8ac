"""What a trace of reinforcement learning's steps says, on one whose times can be added up by hand.

`python -m benchmarks.rl_step` takes real ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.rl_step import PHASES, SECTIONS, UNNAMED, annotated, largest_gap, lines, medians, phases_of
from jaxserve.bench.trace import Event, Trace


def event(name: str, begin_ms: float, end_ms: float, **args: Any) -> Event:
    return Event(name, 1000 * begin_ms, 1000 * end_ms, args)


def trace_of(*, plan_ms: float = 20) -> Trace:
    """One step. Devices compute 40 to 50 and 60 to 70 for the engine, 85 to 95 for the trainer, 110 to 120 for the weights."""
    scheduler = [
        event("idle", 0, 10),
        event("receive", 10, 15),
        event("schedule", 15, 15 + plan_ms),
        event("launch", 35, 40),
        event("launch prefill", 36, 40, step_num="1"),
        event("wait", 40, 55),
        event("launch", 55, 60),
        event("launch decode", 55, 60, step_num="2"),
        event("wait", 60, 70),
        event("process", 70, 78),
        event("idle", 78, 100),
        event("receive", 100, 101),
        event("idle", 101, 130),
    ]
    program = [
        event("generate", 0, 80),
        event("plan the request", 1, 5),
        event("train", 80, 100),
        event("PjitFunction(train_step)", 82, 85),
        event("hand over", 100, 130),
    ]
    commands = [event("check tensors", 102, 104), event("make tensors", 106, 125), event("PjitFunction(_cut)", 106, 109)]
    device = [event("dot", begin, begin + 10) for begin in (40, 60, 85, 110)]
    return Trace(Path("trace"), scheduler, device, 1, [commands, program])


def test_gaps_go_by_what_the_host_did() -> None:
    generate, train, hand_over = phases_of(trace_of())
    assert (generate.name, train.name, hand_over.name) == PHASES
    assert (generate.ms, generate.busy_ms, generate.num_launches) == (80, 20, 2)
    assert generate.gaps_ms == pytest.approx(
        {
            f"{UNNAMED}, before the first step": 6,  # the scheduler is idle, and of its 10 ms the program's thread plans 4
            "plan the request, before the first step": 4,
            "receive, before the first step": 5,
            "schedule, before the first step": 20,
            "launch, before the first step": 5,
            "wait, between": 5,
            "launch, between": 5,
            "process, behind the last": 8,
            f"{UNNAMED}, behind the last": 2,
        }
    )
    assert train.gaps_ms == pytest.approx({"PjitFunction(train_step)": 3, UNNAMED: 7})
    assert hand_over.gaps_ms == pytest.approx({"receive": 1, UNNAMED: 8, "check tensors": 2, "make tensors": 9})
    for phase in (generate, train, hand_over):
        assert phase.busy_ms + sum(phase.gaps_ms.values()) == pytest.approx(phase.ms)


def test_the_largest_gap_is_named() -> None:
    phases = medians([phase for plan_ms in (18, 20, 19) for phase in phases_of(trace_of(plan_ms=plan_ms))])
    assert largest_gap(phases) == (pytest.approx(19), "generate: schedule, before the first step")
    shown = [" ".join(line.split()) for line in lines(phases)]
    assert shown[0] == "generate, 2 steps of the engine 80.0 ms 61.5%"
    assert shown[2] == "none: schedule, before the first step 19.0 ms 14.6%"
    assert shown[-1] == "Largest gap: generate: schedule, before the first step, 19.0 ms, 14.6% of a step of 130.0 ms"


def test_what_is_to_stand_in_traces_exists() -> None:
    before = [vars(owner)[attribute] for owner, attribute, _ in SECTIONS]
    with annotated():
        assert all(vars(owner)[attribute] is not old for (owner, attribute, _), old in zip(SECTIONS, before, strict=True))
    assert before == [vars(owner)[attribute] for owner, attribute, _ in SECTIONS]
