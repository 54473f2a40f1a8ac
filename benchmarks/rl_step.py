"""Where the time of one step of reinforcement learning goes: a trace of examples/grpo.py, read.

    python -m benchmarks.rl_step [--steps 8] [--warm 20] [--folder FOLDER]
    python -m benchmarks.rl_step --against CHECKOUT [--rounds 5]

Trainer and engine in one process, first on half of the devices each, then both on all of them. After some warm steps one trace
is taken of the host's threads and the devices. Of each phase it says, as medians over the steps: its time by the clock, in how
much of it some device computes, and, where none does, what the host did meanwhile: the stage of the scheduler's thread, else
one of SECTIONS in whatever thread, else a call of JAX in the program's own. "unnamed" is Python beside these, and threads that
wait for one another. On a CPU devices share the cores with the host. With --against the same is done in turns here and in
another checkout, which has this command, too.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from examples import grpo
from jaxserve.bench.trace import Event, Trace, gaps, overlaps, read_trace, stages, union
from jaxserve.models import leaf_names
from jaxserve.models.tensor_update import TensorUpdate
from jaxserve.server.detokenizer import Detokenizer
from jaxserve.server.engine_rollouts import RolloutMethods
from jaxserve.server.generation import Generation
from jaxserve.server.rollouts import RolloutJob

GENERATE, TRAIN, HAND_OVER = PHASES = ("generate", "train", "hand over")
# What stands in the trace beside the scheduler's stages: owner, attribute, name.
SECTIONS: Sequence[tuple[Any, str, str]] = (
    (RolloutMethods, "_rollout_job", "plan the request"),
    (Generation, "_send_request", "send to the scheduler"),
    (Detokenizer, "process", "detokenizer"),
    (Generation, "receive", "take in outputs"),
    (RolloutJob, "rollouts", "pad into arrays"),
    (grpo, "rewards_of", "rewards"),
    (leaf_names, "named_leaves", "name the weights"),
    (leaf_names, "hugging_face_names", "name the weights"),
    (TensorUpdate, "problems", "check tensors"),
    (TensorUpdate, "apply", "make tensors"),
)
UNNAMED = "unnamed"
_SHOWN_SHARE = 0.01  # of the step; what takes less is summed up


@dataclasses.dataclass(frozen=True)
class Phase:
    """Of one step, or medians of several."""

    name: str
    ms: float
    busy_ms: float  # some device computes
    num_launches: int  # of the engine's steps
    gaps_ms: dict[str, float]  # no device computes: for how long the host did what


@contextlib.contextmanager
def annotated() -> Iterator[None]:
    """SECTIONS stand in traces."""
    originals = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in SECTIONS]
    for owner, attribute, name in SECTIONS:
        setattr(owner, attribute, _annotated(getattr(owner, attribute), name))
    try:
        yield
    finally:
        for owner, attribute, original in originals:
            setattr(owner, attribute, original)


def _annotated(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.profiler.TraceAnnotation(name):
            return function(*args, **kwargs)

    @functools.wraps(function)
    async def await_it(*args: Any, **kwargs: Any) -> Any:
        with jax.profiler.TraceAnnotation(name):
            return await function(*args, **kwargs)

    return await_it if asyncio.iscoroutinefunction(function) else call


def traced(folder: str, *, same_devices: bool, num_warm: int, num_steps: int) -> Trace:
    with annotated(), grpo.started(same_devices=same_devices) as trainer:
        for _ in range(num_warm):
            _step(trainer)
        trainer.engine.start_profile(output_dir=folder)
        for _ in range(num_steps):
            _step(trainer)
        return read_trace(trainer.engine.stop_profile().output_dir)


def _step(trainer: grpo.Trainer) -> None:
    with jax.profiler.TraceAnnotation(GENERATE):
        drawn = trainer.generate()
    with jax.profiler.TraceAnnotation(TRAIN):
        trainer.train(drawn)
    with jax.profiler.TraceAnnotation(HAND_OVER):
        trainer.hand_over()


# --- reading


def phases_of(trace: Trace) -> Iterator[Phase]:
    """One after the other, step by step."""
    main = next(events for events in trace.others if any(event.name in PHASES for event in events))
    names = {name for *_, name in SECTIONS}
    sections = [event for events in (trace.host, *trace.others) for event in events if event.name in names]
    layers = [
        [event for event in stages(trace) if event.name != "idle"],
        sorted(sections, key=lambda event: event.begin_us),
        [event for event in main if event.name not in {*PHASES, *names}],
    ]
    for event in main:
        if event.name in PHASES:
            yield _phase(trace, layers, event)


def _phase(trace: Trace, layers: Sequence[Sequence[Event]], phase: Event) -> Phase:
    begin, end = phase.begin_us, phase.end_us
    here = [[event for event in layer if event.end_us > begin and event.begin_us < end] for layer in layers]
    if phase.name == HAND_OVER:  # the scheduler only looks whether it is done
        here = [here[1], here[0], here[2]]
    busy = union(trace.device, begin, end)
    found: collections.Counter[str] = collections.Counter()
    for start, stop in gaps(busy, begin, end):
        for name, us in _shares(here, start, stop):
            found[name + _place(phase, busy, start)] += us / 1e3
    busy_ms = sum(stop - start for start, stop in busy) / 1e3
    num_launches = sum(begin <= launch.begin_us < end for launch in trace.launches)
    return Phase(phase.name, phase.us / 1e3, busy_ms, num_launches, dict(found))


def _place(phase: Event, busy: Sequence[tuple[float, float]], start: float) -> str:
    """Of a gap that begins there."""
    if phase.name != GENERATE or not busy:
        return ""
    return ", before the first step" if start < busy[0][0] else ", behind the last" if start >= busy[-1][1] else ", between"


def _shares(layers: Sequence[Sequence[Event]], start: float, stop: float) -> Iterator[tuple[str, float]]:
    """What is in the first layer counts; what is not, by the others."""
    if not layers:
        yield UNNAMED, stop - start
        return
    layer, *others = layers
    yield from overlaps(_outermost(layer), start, stop)
    for begin, end in gaps(union(layer, start, stop), start, stop):
        yield from _shares(others, begin, end)


def _outermost(events: Sequence[Event]) -> Iterator[Event]:
    end = float("-inf")
    for event in events:
        if event.end_us > end:
            yield event if event.begin_us >= end else dataclasses.replace(event, begin_us=end)
            end = event.end_us


def median_of(phases: Sequence[Phase]) -> Phase:
    """Of phases of one name."""
    median, names = statistics.median, {name for phase in phases for name in phase.gaps_ms}
    return Phase(
        phases[0].name,
        median(phase.ms for phase in phases),
        median(phase.busy_ms for phase in phases),
        round(median(phase.num_launches for phase in phases)),
        {name: median(phase.gaps_ms.get(name, 0.0) for phase in phases) for name in names},
    )


def medians(phases: Sequence[Phase]) -> list[Phase]:
    return [median_of([phase for phase in phases if phase.name == name]) for name in PHASES]


def lines(phases: Sequence[Phase]) -> Iterator[str]:
    step_ms = sum(phase.ms for phase in phases)
    form = "{:<52}{:>8.1f} ms{:>7.1%}"
    for phase in phases:
        about = f", {phase.num_launches} steps of the engine" if phase.num_launches else ""
        yield form.format(phase.name + about, phase.ms, phase.ms / step_ms)
        yield form.format("  some device computes", phase.busy_ms, phase.busy_ms / step_ms)
        shown = {name: ms for name, ms in phase.gaps_ms.items() if ms >= _SHOWN_SHARE * step_ms}
        rest_ms = sum(phase.gaps_ms.values()) - sum(shown.values())
        for name, ms in [*sorted(shown.items(), key=lambda item: -item[1]), ("less than 1% each", rest_ms)]:
            yield form.format(f"  none: {name}", ms, ms / step_ms)
    ms, name = largest_gap(phases)
    yield f"Largest gap: {name}, {ms:.1f} ms, {ms / step_ms:.1%} of a step of {step_ms:.1f} ms"


def largest_gap(phases: Sequence[Phase]) -> tuple[float, str]:
    return max((ms, f"{phase.name}: {name}") for phase in phases for name, ms in phase.gaps_ms.items())


# --- running


def measure(options: argparse.Namespace) -> dict[str, list[Phase]]:
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        for where, same_devices in (("half of the devices each", False), ("all devices both", True)):
            kept = options.folder or folder
            trace = traced(kept, same_devices=same_devices, num_warm=options.warm, num_steps=options.steps)
            measured[where] = medians([*phases_of(trace)])
    return measured


def compare(options: argparse.Namespace) -> None:
    """This checkout and the other one, in turns."""
    folders = pathlib.Path(__file__).resolve().parents[1], options.against.resolve()
    runs: dict[str, list[list[list[Phase]]]] = {}  # by where the devices are; of each round here and there, the phases
    for number in range(options.rounds):
        turns = folders if number % 2 else folders[::-1]
        found = {folder: _measured_in(folder, options) for folder in turns}
        for where in found[folders[0]]:
            runs.setdefault(where, []).append([found[folder][where] for folder in folders])
        print(f"round {number}", flush=True)
    for where, rounds in runs.items():
        print(f"\n{where}: here, there (medians of {len(rounds)} rounds), here / there within a round")
        for name, times_ms in _by_part(rounds).items():
            new_ms, old_ms = (statistics.median(pair[i] for pair in times_ms) for i in (0, 1))
            if max(new_ms, old_ms) >= 1.0:
                ratio = statistics.median(new / max(old, 1e-3) for new, old in times_ms)
                print(f"{name:<52}{new_ms:>8.1f}{old_ms:>8.1f} ms{ratio:>7.2f}")


def _measured_in(folder: pathlib.Path, options: argparse.Namespace) -> dict[str, list[Phase]]:
    command = [sys.executable, "-m", "benchmarks.rl_step", "--json", f"--steps={options.steps}", f"--warm={options.warm}"]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    printed = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = json.loads(printed.splitlines()[-1])
    return {where: [Phase(**phase) for phase in phases] for where, phases in found.items()}


def _by_part(rounds: Sequence[Sequence[Sequence[Phase]]]) -> dict[str, list[tuple[float, float]]]:
    """Of each phase and each of its gaps, the milliseconds here and there in each round."""
    found = {}
    for place, name in enumerate(PHASES):
        pairs = [[phases[place] for phases in pair] for pair in rounds]
        found[name] = [(new.ms, old.ms) for new, old in pairs]
        for gap in {gap: None for pair in pairs for phase in pair for gap in phase.gaps_ms}:
            found[f"  {name}: {gap}"] = [(new.gaps_ms.get(gap, 0.0), old.gaps_ms.get(gap, 0.0)) for new, old in pairs]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", type=int, default=20)
    parser.add_argument("--folder", help="where traces are kept; default: nowhere")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--against", type=pathlib.Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=5, help="with --against")
    options = parser.parse_args()
    if options.against is not None:
        compare(options)
        return
    measured = measure(options)
    if options.json:
        print(json.dumps({where: [dataclasses.asdict(phase) for phase in phases] for where, phases in measured.items()}))
        return
    for where, phases in measured.items():
        print(f"\n{where}", *lines(phases), sep="\n")


if __name__ == "__main__":
    main()
