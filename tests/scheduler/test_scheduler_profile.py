"""Profiles, with the fake runner: which steps a trace has, when it ends, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scheduler_harness import Harness, prompt_of

from jaxserve.messages import ControlReply, ProfileEnded, ShutdownReq
from jaxserve.scheduler.control.start_profile import ProfileReq, ProfileReqOutput
from jaxserve.scheduler.control.stop_profile import StopProfileReq

both_loops = pytest.mark.parametrize("overlap", [True, False])


def ask(harness: Harness, request: ProfileReq | StopProfileReq) -> Any:
    """The reply, or the error's text."""
    count = len(harness.transport.replies)
    harness.control(request)
    give_up_s = time.monotonic() + 30
    while len(harness.transport.replies) == count and time.monotonic() < give_up_s:
        harness.turn()
    reply = harness.transport.replies[-1]
    assert isinstance(reply, ControlReply)
    return reply.error or harness.control_replies()[-1]


def until_complete(harness: Harness) -> None:
    give_up_s = time.monotonic() + 30
    while harness.scheduler.profiler.folder is not None:
        harness.turn()
        assert time.monotonic() < give_up_s


def launches(harness: Harness) -> list[tuple[str, int, int, int]]:
    """Kind, number, rows and tokens of the steps that were annotated."""
    return [
        (name.removeprefix("launch "), facts["step_num"], facts["rows"], facts["tokens"])
        for name, facts in harness.runner.spans
        if name.startswith("launch ")
    ]


@both_loops
def test_a_trace_of_so_many_steps_ends_by_itself(make_harness: Callable[..., Harness], tmp_path: Path, overlap: bool) -> None:
    harness = make_harness(overlap=overlap)
    harness.submit(prompt_of(5), 20, ignore_eos=True)
    harness.turn(3)
    assert not harness.runner.spans
    reply = ask(harness, ProfileReq(output_dir=str(tmp_path), num_steps="4", profile_id="one", activities=["cpu", "MEM"]))
    assert reply == ProfileReqOutput(f"Profiling to {tmp_path}/one.", f"{tmp_path}/one")
    assert "is being taken already" in ask(harness, ProfileReq(output_dir=str(tmp_path)))
    harness.run()
    until_complete(harness)
    assert launches(harness) == [("decode", 4 + i, 1, 1) for i in range(4)]
    names = (tmp_path / "one" / "trace.txt").read_text().split("\n")
    assert {"receive", "schedule", "wait", "process"} <= set(names)
    assert names.count("wait") >= 4, "the results of all steps belong to it"
    assert (tmp_path / "one" / "memory.pprof").exists()
    assert "The last one ended by itself; it is in" in ask(harness, StopProfileReq())
    harness.assert_as_expected()


def test_from_a_step_on(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make_harness()
    ask(harness, ProfileReq(output_dir=str(tmp_path), start_step=5, num_steps=2))
    harness.submit(prompt_of(5), 20, ignore_eos=True)
    harness.run()
    assert [number for _, number, _, _ in launches(harness)] == [5, 6]


def test_until_it_is_stopped(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make_harness()
    ask(harness, ProfileReq(output_dir=str(tmp_path), profile_prefix="x", profile_id="y"))
    harness.submit(prompt_of(5), 9, ignore_eos=True)
    harness.run()
    assert ask(harness, StopProfileReq()).output_dir == f"{tmp_path}/x-y"
    assert launches(harness)[0] == ("prefill", 1, 1, 5)
    assert len(launches(harness)) == 9
    spans = len(harness.runner.spans)
    harness.submit(prompt_of(5), 9)
    harness.run()
    assert len(harness.runner.spans) == spans
    assert ask(harness, ProfileReq(output_dir=str(tmp_path), profile_prefix="x", profile_id="y")).output_dir.endswith("x-y-2")


@both_loops
@pytest.mark.parametrize("num_steps", [2, 7])
def test_by_stage(make_harness: Callable[..., Harness], tmp_path: Path, num_steps: int, overlap: bool) -> None:
    harness = make_harness({"chunked_prefill_size": 8}, overlap=overlap)
    ask(harness, ProfileReq(output_dir=str(tmp_path), profile_id="p", num_steps=num_steps, profile_by_stage=True))
    harness.submit(prompt_of(30), 30, ignore_eos=True)
    harness.run()
    until_complete(harness)
    harness.assert_as_expected()
    prefill = (tmp_path / "p" / "prefill" / "trace.txt").read_text()
    assert prefill.count("launch prefill") == min(num_steps, 4)
    assert prefill.count("launch decode") == (0 if num_steps < 4 else 1), "the step that shows that prefill is over"
    decode = (tmp_path / "p" / "decode" / "trace.txt").read_text()
    told = [message.folder if isinstance(message, ProfileEnded) else "" for message in harness.transport.profiles]
    assert told == ["", f"{tmp_path}/p/prefill", "", f"{tmp_path}/p/decode"]
    assert (decode.count("launch prefill"), decode.count("launch decode")) == (0, num_steps)


def test_one_stage_alone(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make_harness()
    ask(harness, ProfileReq(output_dir=str(tmp_path), num_steps=3, profile_stages=["decode"]))
    harness.submit(prompt_of(5), 12, ignore_eos=True)
    harness.run()
    assert [kind for kind, *_ in launches(harness)] == ["decode"] * 3


def test_a_trace_that_runs_at_the_end_is_completed(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make_harness()
    harness.submit(prompt_of(5), 6, ignore_eos=True)
    ask(harness, ProfileReq(output_dir=str(tmp_path), profile_id="p"))
    harness.send(ShutdownReq())
    harness.loop.run()
    assert (tmp_path / "p" / "trace.txt").exists()


def test_stopped_before_its_first_step(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make_harness()
    ask(harness, ProfileReq(output_dir=str(tmp_path), start_step=100))
    assert "Nothing was profiled" in ask(harness, StopProfileReq()).message
    assert ask(harness, StopProfileReq()) == "No profile is being taken."
    assert not harness.runner.commands


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_steps": 0}, "num_steps must be a number of at least 1, got 0."),
        ({"start_step": "x"}, "start_step must be a number of at least 1, got 'x'."),
        ({"activities": ["CPU", "RPD"]}, "activities must be of CPU, GPU, MEM, got 'RPD'"),
        ({"profile_by_stage": True}, "profile_by_stage needs num_steps."),
        ({"profile_id": "../x"}, "profile_id must be 1 to 128 letters"),
        ({"profile_prefix": ".."}, "profile_prefix must be 1 to 128 letters"),
        ({"output_dir": "/proc/nowhere"}, "Profiles cannot be written to '/proc/nowhere': No such file or directory."),
        ({"output_dir": "a\0b"}, "Profiles cannot be written to"),
    ],
)
def test_what_is_refused(make_harness: Callable[..., Harness], fields: dict[str, Any], message: str) -> None:
    harness = make_harness()
    assert message in ask(harness, ProfileReq(**fields))
    assert ask(harness, StopProfileReq()) == "No profile is being taken."


def test_where_it_goes_by_default(
    make_harness: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXSERVE_PROFILER_DIR", str(tmp_path / "variable"))
    assert str(tmp_path / "variable") in ask(make_harness(), ProfileReq()).output_dir
    harness = make_harness({"profile_dir": str(tmp_path / "option")})
    assert str(tmp_path / "option") in ask(harness, ProfileReq()).output_dir


def test_one_waits_for_the_files_of_the_last(make_harness: Callable[..., Harness], tmp_path: Path) -> None:
    harness = make_harness()
    ask(harness, ProfileReq(output_dir=str(tmp_path), num_steps=2))
    harness.runner.command_delay_s = 0.1
    harness.submit(prompt_of(5), 5, ignore_eos=True)
    harness.run(max_turns=10_000_000)
    assert "Profiling to" in ask(harness, ProfileReq(output_dir=str(tmp_path))).message
