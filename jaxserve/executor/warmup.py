"""Compiles many programs at once.

Tracing holds Python's lock and runs in turn; XLA's compilation does not and runs in parallel beside it. The compiled
executables themselves are what serves: a shape nobody compiled is an error, never a compilation.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.executor.compile_counter import CompileCounter as CompileCounter
from jaxserve.executor.compile_counter import in_context
from jaxserve.kernels.machine import user_cache
from jaxserve.progress import progress_bar

logger = logging.getLogger(__name__)

# One thread traces while those of all cores compile.
_NUM_THREADS = (os.cpu_count() or 1) + 1
# How often to ask whether another process has done what only it was left to do.
_POLL_S = 0.05

_Key = TypeVar("_Key", bound=Hashable)
_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)


def cache_folder(folder: str | None) -> pathlib.Path:
    """`folder`, or the default in $XDG_CACHE_HOME/jaxserve; made if it is not there. OSError with a sentence if that fails."""
    path = user_cache() / "compiled" if folder is None else pathlib.Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"The folder of compiled programs {str(path)!r} cannot be made: {error.strerror}.") from error
    return path


@contextlib.contextmanager
def jax_cache(folder: pathlib.Path) -> Iterator[None]:
    """JAX's own persistent cache, for what is compiled to load weights, in a process that is ours alone. Not for the programs
    that serve: see `jax_cache_reads`."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


class Compilable(Protocol[_Result_co]):
    """jax.stages.Lowered is one."""

    def compile(self) -> _Result_co: ...


class Work(Generic[_Key, _Result]):
    """Tasks that several threads do, each of them one at a time.

    A task returns None while another process is at it. Then the others come first, and it comes round again: processes with the
    same tasks do different ones, and wait only for what is left with others.
    """

    def __init__(self, tasks: Mapping[_Key, Callable[[], _Result | None]], stopped: threading.Event | None = None) -> None:
        """`stopped`: once it is set, only what was begun is done."""
        self._tasks = tasks
        self._left = collections.deque(tasks)
        self._stopped = stopped or threading.Event()
        self._has_waited = False

    def results(self) -> Iterator[tuple[_Key, _Result]]:
        """Of the tasks that the calling thread does."""
        in_vain = 0
        while not self._stopped.is_set():
            try:
                key = self._left.popleft()
            except IndexError:
                return
            result = self._tasks[key]()
            if result is not None:
                in_vain = 0
                yield key, result
                continue
            self._left.append(key)
            in_vain += 1
            if in_vain >= len(self._left):
                in_vain = 0
                self._wait()

    def run(self, on_result: Callable[[_Key, _Result], None]) -> None:
        """In as many threads as there are cores, which call `on_result`. After an error only what was begun is done."""

        def work() -> None:
            for key, result in self.results():
                on_result(key, result)

        with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
            futures = [pool.submit(in_context(work)) for _ in range(min(_NUM_THREADS, len(self._tasks)))]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            finally:
                self._stopped.set()

    def _wait(self) -> None:
        if not self._has_waited:
            self._has_waited = True
            logger.info("Waiting for other processes, which compile what is left: %d.", len(self._left))
        self._stopped.wait(_POLL_S)


def do_all(tasks: Mapping[_Key, Callable[[], _Result | None]], *, show_progress: bool) -> dict[_Key, _Result]:
    """{key: result} of tasks as Work has them, with a bar of how many are there, whoever did them."""
    done: dict[_Key, _Result] = {}
    bar = progress_bar(len(tasks), "Compiling", "program", show=show_progress)

    def on_result(key: _Key, result: _Result) -> None:
        done[key] = result
        bar.update()

    with bar:
        Work(tasks).run(on_result)
    return {key: done[key] for key in tasks}


def compile_all(lower: Mapping[_Key, Callable[[], Compilable[_Result]]], *, show_progress: bool) -> dict[_Key, _Result]:
    """Lowers one at a time, compiles in as many threads as there are cores; {key: executable}. Knows no other process."""
    tracing = threading.Lock()

    def compile_one(make: Callable[[], Compilable[_Result]]) -> _Result:
        with tracing:
            lowered = make()
        return lowered.compile()

    return do_all({key: functools.partial(compile_one, make) for key, make in lower.items()}, show_progress=show_progress)
