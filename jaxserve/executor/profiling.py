"""JAX's profiler behind two commands. One trace in a process at a time, of all its threads and devices."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import jax

from jaxserve.commands import CommandError, StartProfile, StopProfile

# Of XLA's tracer on the host: annotations, and what runtime and compiler do.
_HOST_LEVEL = 2


def start(command: StartProfile) -> None:
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = _HOST_LEVEL if command.traces_host else 0
    options.python_tracer_level = 1 if command.traces_python else 0
    try:
        jax.profiler.start_trace(command.folder, profiler_options=options)
        with jax.profiler.TraceAnnotation("clock", unix_ns=str(time.time_ns())):
            pass
    except RuntimeError as error:
        raise CommandError(f"No profile can be started: {error}") from error


def stop(command: StopProfile) -> None:
    try:
        jax.profiler.stop_trace()
        if command.memory_file is not None:
            jax.profiler.save_device_memory_profile(command.memory_file)
    except RuntimeError as error:
        raise CommandError(f"The profile could not be completed: {error}") from error


def annotation(name: str, facts: dict[str, Any]) -> AbstractContextManager[Any]:
    kind = jax.profiler.StepTraceAnnotation if "step_num" in facts else jax.profiler.TraceAnnotation
    return kind(name, **facts)
