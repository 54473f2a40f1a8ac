"""Counts what XLA compiles, in a process that may be somebody else's, who compiles as well.

JAX tells of each compilation in the thread that waits for it. For whom the thread does what it does is said by its context
(`CompileCounter.ours`), which goes with work into other threads (`in_context`).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import jax

from jaxserve.executor.own_settings import own_settings

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_READ_EVENT = "/jax/compilation_cache/cache_retrieval_time_sec"

_counter: contextvars.ContextVar[CompileCounter | None] = contextvars.ContextVar("compile_counter", default=None)
_cache_reads: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("jax_cache_reads", default=None)

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class CompileCounter:
    """Counts the programs that XLA compiled, or JAX read from its cache."""

    def __init__(self, *, only_ours: bool = False) -> None:
        """`only_ours`: of those in this process only what is compiled in `ours`."""
        self.count = 0
        self._only_ours = only_ours
        self._count_at_ready: int | None = None
        if not only_ours:
            jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """What this thread compiles meanwhile counts."""
        token = _counter.set(self if self._only_ours else None)
        try:
            yield
        finally:
            _counter.reset(token)

    def mark_ready(self) -> None:
        """All that a server compiles is compiled."""
        self._count_at_ready = self.count

    @property
    def after_ready(self) -> int:
        return 0 if self._count_at_ready is None else self.count - self._count_at_ready

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            self.count += 1


@contextlib.contextmanager
def jax_cache_reads() -> Iterator[list[str]]:
    """A list with an entry for each program that JAX reads meanwhile, in this thread, from its own persistent cache.

    On CPU such a program must not get into ours: it can be written and read again, but as it runs its functions are not found.
    """
    reads: list[str] = []
    token = _cache_reads.set(reads)
    try:
        yield reads
    finally:
        _cache_reads.reset(token)


def _on_event(event: str, duration_secs: float, **facts: Any) -> None:
    if (counter := _counter.get()) is not None:
        counter._on_event(event, duration_secs, **facts)
    if event == _CACHE_READ_EVENT and (reads := _cache_reads.get()) is not None:
        reads.append(event)


# Once and for good: if JAX's list of listeners became shorter while it tells them something, it would pass one over.
jax.monitoring.register_event_duration_secs_listener(_on_event)


def in_context(work: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`work` for other threads, for whom this one does its own: there it counts, too, and has `own_settings`."""
    counter = _counter.get()
    if counter is None:
        return work

    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with counter.ours(), own_settings():
            return work(*args, **kwargs)

    return run


class _Counting(Protocol):
    _counter: CompileCounter


_Owner = TypeVar("_Owner", bound=_Counting)


def counted(
    method: Callable[Concatenate[_Owner, _Arguments], _Result],
) -> Callable[Concatenate[_Owner, _Arguments], _Result]:
    """What the calling thread compiles in the method counts for the object's counter."""

    @functools.wraps(method)
    def counting(self: _Owner, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with self._counter.ours():
            return method(self, *args, **kwargs)

    return counting
