"""Tables of docs/capacity.md whose rows are plans, compiled or not."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeVar

from benchmarks.model_configs import write_config
from jaxserve.aot.capacity_plan import CapacityPlan, PlanOptions, StepPlan
from jaxserve.aot.planner import plan_capacity
from jaxserve.aot.report import compiler_versions
from jaxserve.aot.targets import parse_target
from jaxserve.config import ServerArgs
from jaxserve.models import ModelConfig

GIB = 1 << 30
Compiles = Literal["none", "largest"]
Case = TypeVar("Case")


def plan(raw: dict[str, Any], topology: str, compiles: Compiles = "largest", **options: Any) -> CapacityPlan:
    """Of a model as in its config.json, with these options of the server."""
    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig.from_pretrained(write_config(Path(folder), raw))
        args = ServerArgs(model_path=folder, **options)
        found = plan_capacity(args, config, parse_target(topology), PlanOptions(compile=compiles, show_progress=False))
    assert found.failure is None and found.memory is not None, found.failure
    return found


def taken(step: StepPlan) -> int:
    """Bytes beside the step's arguments, where it takes most."""
    return max((program.temp_bytes + program.new_output_bytes for program in step.programs), default=0)


def compilers() -> str:
    tools = ("jax", "libtpu", "jax-cuda13-plugin")
    return ", ".join(f"{name} {version}" for name, version in compiler_versions().items() if name in tools)


def print_table(titles: str, row: Callable[[Case], str], cases: Sequence[Case]) -> None:
    """`titles`: of the columns, the first two of them of text."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    columns = titles.split("|")
    print(f"| {titles} |\n|{'---|' * 2}{'--:|' * (len(columns) - 2)}", flush=True)
    # A process for each: what its compiler holds goes with it.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for line in processes.map(row, cases):
            print(line, flush=True)


@dataclasses.dataclass(frozen=True)
class Section:
    """Of docs/capacity.md, with one table."""

    header: str  # {compiled} says how the table was made
    compiled: str  # of `versions`, on `date`
    estimated: str  # on `date`
    titles: str
    cases: Sequence[Any]  # each with a `model`
    row: Callable[..., str]  # of a case and what is compiled

    def print(self, models: Sequence[str] = (), *, compiles: Compiles = "largest") -> None:
        """`models`: only these."""
        how = self.compiled if compiles == "largest" else self.estimated
        how = how.format(versions=compilers(), date=datetime.date.today().isoformat())
        print(self.header.format(compiled=how))
        cases = [case for case in self.cases if not models or case.model in models]
        print_table(self.titles, functools.partial(self.row, compiles=compiles), cases)

    def main(self, description: str | None) -> None:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("models", nargs="*", help="Only these.")
        parser.add_argument("--estimate", action="store_true", help="Do not compile; plan from shapes.")
        options = parser.parse_args()
        self.print(options.models, compiles="none" if options.estimate else "largest")
