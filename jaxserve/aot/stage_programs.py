"""The programs of one stage of a pipeline, or of a whole model, through the target's compiler, and what memory they need."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxserve.aot.programs import Compilation, ProgramReport
from jaxserve.executor.blueprint import Blueprint, NumPages
from jaxserve.executor.memory import StepMemory
from jaxserve.executor.programs import ProgramKey, program_name
from jaxserve.executor.warmup import compile_all

# Pages of the pool that the largest step is compiled with to learn what it takes, where it does not fit beside the first pool.
_PROBE_PAGES = 64

Reports = dict[ProgramKey, ProgramReport]


@dataclasses.dataclass(frozen=True)
class StagePrograms:
    blueprint: Blueprint
    which: str  # all that a server compiles here, the largest or none
    save_to: Path | None  # a folder for what is compiled
    show_progress: bool

    def compile(self, num_pages: NumPages) -> Reports:
        programs = self.blueprint.program_set
        chosen = {"all": programs.all, "largest": programs.largest, "none": ()}[self.which]
        return self._compile(num_pages, chosen)

    def step_memory(self, reports: Reports, num_pages: NumPages) -> StepMemory:
        """From what was compiled with so many pages. ValueError if the largest programs do not compile beside any pool."""
        largest = self.blueprint.program_set.largest
        if any(report.error for report in reports.values()):
            num_pages = self.blueprint.pages_each(_PROBE_PAGES)
            reports = self._compile(num_pages, largest)
        found = [reports[key] for key in largest]
        for report in found:
            if report.error:
                raise ValueError(f"{report.name} does not compile: {report.error}")
        return StepMemory.of(self.blueprint, [report.memory for report in found], num_pages)

    def _compile(self, num_pages: NumPages, keys: Sequence[ProgramKey]) -> Reports:
        if not keys:
            return {}
        programs, params = self.blueprint.programs(num_pages), self.blueprint.abstract_params()
        kv_cache = self.blueprint.kv_cache(num_pages)
        pool = tuple((kv_cache.pages.count, *page.shape) for page in jax.tree.leaves(kv_cache.pages.arrays))
        lower: dict[Any, Callable[[], Compilation]] = {}
        for key in keys:
            make = functools.partial(programs.lower, key, params)
            lower[key] = functools.partial(self._compilation, program_name(key), make, pool)
        return dict(compile_all(lower, show_progress=self.show_progress))

    def _compilation(self, name: str, lower: Callable[[], Any], pool: tuple[tuple[int, ...], ...]) -> Compilation:
        platform = self.blueprint.platform
        options = {"xla_gpu_autotune_level": "0"} if platform == "gpu" else None  # autotuning needs the device
        return Compilation(name, lower(), platform, pool, options, self.save_to)
