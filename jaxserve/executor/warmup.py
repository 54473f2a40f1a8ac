"""Compiles many programs at once, and counts what XLA compiles.

Tracing holds Python's lock and runs in turn; XLA's compilation does not and runs in parallel behind it. The compiled
executables themselves are what serves: a shape nobody compiled is an error, never a compilation.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.kernels.machine import user_cache
from jaxserve.progress import progress_bar

_Key = TypeVar("_Key", bound=Hashable)
_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


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
    """JAX's own persistent cache, for what is compiled to load weights. Not for the programs that serve: on CPU, one that
    was read from there cannot be written into ours (its functions are not found when it is loaded)."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


class CompileCounter:
    """Counts the programs XLA compiled in this process, or JAX read from its cache."""

    def __init__(self) -> None:
        self.count = 0
        self._count_at_ready: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            self.count += 1

    def mark_ready(self) -> None:
        """All that a server compiles is compiled."""
        self._count_at_ready = self.count

    @property
    def after_ready(self) -> int:
        return 0 if self._count_at_ready is None else self.count - self._count_at_ready


class Compilable(Protocol[_Result_co]):
    """jax.stages.Lowered is one."""

    def compile(self) -> _Result_co: ...


def compile_all(lower: Mapping[_Key, Callable[[], Compilable[_Result]]], *, show_progress: bool) -> dict[_Key, _Result]:
    """Lowers in this thread, compiles in as many threads as there are cores; {key: executable}."""
    bar = progress_bar(len(lower), "Compiling", "program", show=show_progress)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool, bar:

        def compile_one(lowered: Compilable[_Result]) -> _Result:
            compiled = lowered.compile()
            bar.update()
            return compiled

        futures = {key: pool.submit(compile_one, make()) for key, make in lower.items()}
        return {key: future.result() for key, future in futures.items()}
