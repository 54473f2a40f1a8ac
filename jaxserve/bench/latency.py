"""`bench latency`: prompts and decode steps of one batch by the runner itself, beside the device's roofline."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxserve.aot.pipeline_roofline import shard_of
from jaxserve.aot.roofline import Prediction
from jaxserve.bench.roofline import Roofline
from jaxserve.bench.steps import StepDriver, prefill_steps
from jaxserve.config import ServerArgs
from jaxserve.executor import BuiltRunner, build_runner
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.build import draw_blueprints


@dataclasses.dataclass(frozen=True)
class Case:
    batch_size: int
    input_len: int
    output_len: int  # tokens of each row: one from its prompt, the others from decode steps

    @property
    def row_tokens(self) -> int:
        return self.input_len + self.output_len

    def __str__(self) -> str:
        return f"batch {self.batch_size}, {self.input_len} in, {self.output_len} out"


@dataclasses.dataclass(frozen=True)
class Timed:
    case: Case
    prefill_s: tuple[float, ...]  # of each round, the whole batch
    decode_s: tuple[tuple[float, ...], ...]  # of each round, each step
    prefill_least: Prediction | None  # None: no roofline
    decode_least: Prediction | None  # of a step in the middle of the output

    @property
    def prefill_latency(self) -> float:
        return statistics.median(self.prefill_s)

    @property
    def decode_latency(self) -> float:
        """Median step. The first of a round, with nothing to overlap with, is left out where there are others."""
        return statistics.median(step for steps in self.decode_s for step in steps[1:] or steps)

    @property
    def total_latency(self) -> float:
        return statistics.median(first + sum(steps) for first, steps in zip(self.prefill_s, self.decode_s, strict=True))

    def record(self) -> dict[str, Any]:
        """With the names of SGLang's bench_one_batch; seconds, and tokens per second."""
        case = self.case
        prompt_tokens = case.batch_size * case.input_len
        all_tokens = prompt_tokens + case.batch_size * case.output_len
        return {
            **dataclasses.asdict(case),
            "prefill_latency": self.prefill_latency,
            "prefill_throughput": prompt_tokens / self.prefill_latency,
            "median_decode_latency": self.decode_latency,
            "median_decode_throughput": case.batch_size / self.decode_latency,
            "total_latency": self.total_latency,
            "overall_throughput": all_tokens / self.total_latency,
            "prefill_roofline": _least(self.prefill_least),
            "decode_roofline": _least(self.decode_least),
            "prefill_latencies": self.prefill_s,
            "decode_latencies": self.decode_s,
        }


def _least(prediction: Prediction | None) -> dict[str, Any] | None:
    return None if prediction is None else {"latency": prediction.step_s, "bound": prediction.bound}


class LatencyBench:
    """A runner that is ready. Raises ValueError or OSError with a sentence for what a user can mend."""

    def __init__(self, args: ServerArgs, cases: Sequence[Case], *, show_progress: bool = True) -> None:
        self._model = args.effective_served_model_name
        blueprints = draw_blueprints(args)
        _check(blueprints[0], cases)
        self._built: BuiltRunner = build_runner(args, show_progress=show_progress)
        self._driver = StepDriver(self._built.runner)
        for case in cases:
            self._driver.check(case.batch_size, case.row_tokens)
        self.roofline = Roofline.here([shard_of(blueprint) for blueprint in blueprints])

    @property
    def about(self) -> dict[str, Any]:
        """What a record says of the runner and the machine."""
        args, device = self._built.args, jax.devices()[0]
        return {
            "model": self._model,
            "device": device.device_kind,
            "roofline": None if self.roofline is None else self.roofline.source,
            "server_args": args.public_dict(),
        }

    def measure(self, case: Case, rounds: int, on_round: Callable[[], object] = lambda: None) -> Timed:
        """A round that is not counted comes first."""
        self._driver.enter(case.batch_size, case.row_tokens)
        self._round(case)
        prefill_s, decode_s = [], []
        for _ in range(rounds):
            first, steps = self._round(case)
            prefill_s.append(first)
            decode_s.append(tuple(steps))
            on_round()
        least = self._least(case)
        return Timed(case, tuple(prefill_s), tuple(decode_s), *least)

    def trace(self, case: Case, folder: Path) -> None:
        """One round, not timed, under JAX's profiler."""
        self._driver.enter(case.batch_size, case.row_tokens)
        with _profiled(folder), jax.profiler.TraceAnnotation(str(case)):
            self._round(case)

    def _round(self, case: Case) -> tuple[float, list[float]]:
        lengths = [case.input_len] * case.batch_size
        return self._driver.prefill(lengths), self._driver.decode(lengths, case.output_len - 1)

    def _least(self, case: Case) -> tuple[Prediction | None, Prediction | None]:
        if self.roofline is None:
            return None, None
        spec = self._built.runner.spec
        steps = prefill_steps([case.input_len] * case.batch_size, spec.max_step_tokens, spec.page_size)
        middle = case.input_len + case.output_len // 2
        return self.roofline.prefill(steps), self.roofline.decode(case.batch_size, middle)


def _check(blueprint: Blueprint, cases: Sequence[Case]) -> None:
    """Before anything is loaded."""
    rows, context_len = blueprint.args.max_running_requests, blueprint.args.context_length
    assert rows is not None and context_len is not None, blueprint.args
    for case in cases:
        if case.batch_size > rows:
            raise ValueError(f"--batch-size {case.batch_size} needs --max-running-requests {case.batch_size}; it is {rows}.")
        if case.row_tokens > context_len:
            raise ValueError(
                f"--input-len {case.input_len} and --output-len {case.output_len} need {case.row_tokens} tokens; the context "
                f"has {context_len}."
            )


@contextlib.contextmanager
def _profiled(folder: Path) -> Iterator[None]:
    jax.profiler.start_trace(str(folder))
    try:
        yield
    finally:
        jax.profiler.stop_trace()
