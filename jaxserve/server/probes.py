"""Whether every replica works: a token, or a vector, through all its processes, or a sign of life from somebody who is being
served."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from jaxserve.messages import WorkerAddress
from jaxserve.scheduler.control.declaration import ControlStruct
from jaxserve.scheduler.control.get_internal_state import GetInternalStateReq
from jaxserve.server.replicas import Replicas
from jaxserve.server.request_checks import ModelLimits
from jaxserve.server.requests import GenerateReqInput, GenerationChunk, RequestError
from jaxserve.types import SamplingParams

_POLL_S = 0.02


class Probed(Protocol):
    """The TokenizerManager's part."""

    status: Any
    is_paused: bool
    is_input_blocked: bool
    replicas: Replicas

    @property
    def limits(self) -> ModelLimits: ...

    def generate(self, req: GenerateReqInput, *, before_ready: bool = False) -> AsyncGenerator[GenerationChunk, None]: ...

    async def control(self, request: ControlStruct) -> list[Any]: ...


async def probe_replica(manager: Probed, rank: int, *, before_ready: bool = False) -> None:
    """One token from it, or the vector of one. Raises RequestError if it does not come out at the end."""
    pools = not manager.limits.generates
    params = SamplingParams(max_new_tokens=0 if pools else 1, temperature=0.0, ignore_eos=True)
    req = GenerateReqInput(
        input_ids=[[0]], sampling_params=[params], data_parallel_rank=rank, is_health_check=True, pools=pools
    )
    async with contextlib.aclosing(manager.generate(req, before_ready=before_ready)) as chunks:
        async for chunk in chunks:
            reason = chunk.finish_reason
            if reason is not None and reason.type == "abort":
                raise RequestError(f"The probe request was aborted: {reason.message}", status_code=503)


async def is_alive(manager: Probed, heartbeats_s: Mapping[WorkerAddress, float], timeout_s: float) -> bool:
    """Whether all replicas that serve show a sign of life within `timeout_s`, and at least one serves. Idle ones are asked
    for a token, those that take in nothing for their state. `heartbeats_s`: time.monotonic() of the last reply of each."""
    asked_s, replicas = time.monotonic(), manager.replicas
    probes: list[asyncio.Task[Any]]
    if _takes_in_nothing(manager):
        probes = [asyncio.create_task(manager.control(GetInternalStateReq()))]
    else:
        probes = [asyncio.create_task(probe_replica(manager, replica.rank)) for replica in replicas.idle()]
    try:
        while time.monotonic() - asked_s < timeout_s and manager.status != "failed":
            if _takes_in_nothing(manager) and all(map(_has_succeeded, probes)):
                return replicas.num_up > 0
            serving = replicas.serving
            if serving and all(heartbeats_s.get(worker, 0.0) > asked_s for worker in serving):
                return True
            await asyncio.sleep(_POLL_S)
        return False
    finally:
        for probe in probes:
            probe.cancel()
            with contextlib.suppress(asyncio.CancelledError, RequestError):
                await probe


def _takes_in_nothing(manager: Probed) -> bool:
    return manager.is_paused or manager.is_input_blocked


def _has_succeeded(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
