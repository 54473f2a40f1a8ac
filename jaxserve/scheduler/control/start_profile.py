"""start_profile: a trace of the devices and of what the scheduler does meanwhile, for Perfetto and XProf."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Literal

import msgspec

from jaxserve.messages import SCHEDULER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route, each_message
from jaxserve.scheduler.profiler import STAGES, ProfilePlan, folder_for

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler

_ACTIVITIES = ("CPU", "GPU", "MEM")


class ProfileReq(ControlStruct):
    """Begins a trace; the reply names its folder. With `num_steps` it ends by itself, else /stop_profile ends it.

    start_step: the first step, counted from the server's start. profile_by_stage: a trace for prefill steps, then one for
    decode steps, of `num_steps` each. with_stack: also every call of a Python function, which slows the host down. activities:
    CPU (the host), GPU (the devices, always), MEM (what the devices' memory holds at the end).
    """

    output_dir: str | None = None  # parent of the trace's own folder
    start_step: int | str | None = None  # SGLang's clients send strings
    num_steps: int | str | None = None
    activities: list[str] | None = None
    profile_by_stage: bool = False
    profile_stages: list[Literal["prefill", "decode"]] | None = None
    with_stack: bool | None = None
    profile_id: str | None = None
    profile_prefix: str | None = None
    # XLA's traces always have shapes and details, and one file for all devices.
    record_shapes: bool | None = None
    detailed_annotations: bool | None = None
    merge_profiles: bool = False


class ProfileReqOutput(msgspec.Struct):
    message: str
    output_dir: str


def start(scheduler: Scheduler, request: ProfileReq) -> Generator[None, None, ProfileReqOutput]:
    activities = ["CPU", "GPU"] if request.activities is None else [name.upper() for name in request.activities]
    for name in activities:
        if name not in _ACTIVITIES:
            raise ControlError(f"activities must be of {', '.join(_ACTIVITIES)}, got {name!r}: traces are XLA's.")
    first_step, num_steps = _count(request, "start_step"), _count(request, "num_steps")
    stages = tuple(request.profile_stages or STAGES) if request.profile_by_stage or request.profile_stages else ()
    if stages and num_steps is None:
        raise ControlError("profile_by_stage needs num_steps.")
    profiler = scheduler.profiler
    yield from profiler.wait_until_free()
    plan = ProfilePlan(
        folder=folder_for(scheduler.args.profile_dir, request.output_dir, request.profile_id, request.profile_prefix),
        first_step=first_step,
        num_steps=num_steps,
        stages=tuple(stage for stage in STAGES if stage in stages),
        traces_host="CPU" in activities,
        traces_python=bool(request.with_stack),
        saves_memory="MEM" in activities,
    )
    profiler.start(plan)
    return ProfileReqOutput(f"Profiling to {plan.folder}.", plan.folder)


def _count(request: ProfileReq, name: str) -> int | None:
    value = getattr(request, name)
    if value is None or (isinstance(value, int) and value > 0):
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19 and int(value) > 0:
        return int(value)
    raise ControlError(f"{name} must be a number of at least 1, got {value!r}.")


CONTROL = Control(
    name="start_profile",
    request=ProfileReq,
    reply=ProfileReqOutput,
    handlers={SCHEDULER: start},
    route=Route("/start_profile", ("POST", "GET"), render=each_message),
    takes_long=True,
)
