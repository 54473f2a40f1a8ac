"""ProgramCompiler: the programs of one server, from the cache of executables or from XLA."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxserve.executor.blueprint import Blueprint, NumPages
from jaxserve.executor.executable_cache import ExecutableCache
from jaxserve.executor.mesh import is_elsewhere
from jaxserve.executor.programs import ProgramKey, StepPrograms, program_name
from jaxserve.executor.step import Params
from jaxserve.executor.warmup import Work, do_all

# XLA times candidates for matmuls on a GPU; where there is none, it takes the libraries' first choice.
_WITHOUT_GPU = {"xla_gpu_autotune_level": "0"}


@dataclasses.dataclass(frozen=True)
class _Compilation:
    """What is compiled goes into the cache in the same thread."""

    lowered: Any
    name: str
    options: str  # that it was lowered with
    cache: ExecutableCache
    more_options: dict[str, str] | None

    def compile(self) -> Any:
        """After an edit that changes nothing of this program it is still there, under what it was lowered to."""
        # Arguments that it does not use are not in the text, but it is called with them.
        parts = (self.lowered.as_text(), self.lowered.in_tree, self.lowered.in_avals, self.lowered.out_tree, self.options)
        same = "\n".join(map(str, parts))
        compile_it = functools.partial(self.lowered.compile, compiler_options=self.more_options)
        return self.cache.find(self.name, same) or self.cache.compile(self.name, same, compile_it)


@dataclasses.dataclass(frozen=True)
class ProgramCompiler:
    num_pages: NumPages  # of the pools that the programs are for
    programs: StepPrograms
    params: Params  # shapes with shardings
    cache: ExecutableCache
    more_options: dict[str, str] | None  # of XLA, beside those of the programs
    tracing: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @staticmethod
    def of(blueprint: Blueprint, num_pages: NumPages, cache_folder: Path) -> ProgramCompiler:
        cache = ExecutableCache(cache_folder / "executables", blueprint.mesh, blueprint.description(num_pages))
        more_options = _WITHOUT_GPU if blueprint.platform == "gpu" and is_elsewhere(blueprint.mesh) else None
        return ProgramCompiler(num_pages, blueprint.programs(num_pages), blueprint.abstract_params(), cache, more_options)

    def load(self, key: ProgramKey) -> Any | None:
        """From the cache, or None."""
        return self.cache.load(program_name(key))

    def lower(self, key: ProgramKey) -> _Compilation:
        """Holds Python's lock; what it returns has a `compile` that does not."""
        lowered = self.programs.lower(key, self.params)
        return _Compilation(lowered, program_name(key), repr(self.programs.compiler_options), self.cache, self.more_options)

    def load_all(self, keys: Iterable[ProgramKey]) -> dict[ProgramKey, Any]:
        """Those that are in the cache."""
        return {key: program for key in keys if (program := self.load(key)) is not None}

    def obtain(self, keys: Sequence[ProgramKey], *, show_progress: bool) -> dict[ProgramKey, Any]:
        """All of them. What is not cached is compiled in as many threads as there are cores, or waited for where another
        process is at it."""
        found = self.load_all(keys)
        missing = [key for key in keys if key not in found]
        if missing:
            found |= do_all(self._tasks(missing), show_progress=show_progress)
            self.cache.prune()
        return found

    def work(self, keys: Iterable[ProgramKey], stopped: threading.Event | None = None) -> Work[ProgramKey, Any]:
        """To obtain them one by one, until that is set."""
        return Work(self._tasks(keys), stopped)

    def _tasks(self, keys: Iterable[ProgramKey]) -> dict[ProgramKey, Callable[[], Any | None]]:
        return {key: functools.partial(self._obtain_unless_claimed, key) for key in keys}

    def _obtain_unless_claimed(self, key: ProgramKey) -> Any | None:
        """None while another process compiles it.

        No deadlock: a thread holds one claim at most, none waits while it holds one, and whoever traces waits for nothing.
        """
        name = program_name(key)
        with contextlib.ExitStack() as claimed:
            with self.tracing:  # before the claim: of what would wait for its turn here, another process can trace the next
                if not claimed.enter_context(self.cache.claim(name)):
                    return None
                program = self.cache.load(name)  # since somebody looked, another may have compiled it
                if program is not None:
                    return program
                lowered = self.lower(key)
            return lowered.compile()
