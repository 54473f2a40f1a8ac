"""get_metrics: a worker's metrics, as plain numbers. /metrics shows those of all processes."""

from __future__ import annotations

from typing import Protocol

import msgspec

from jaxserve.messages import DETOKENIZER, FRONT, SCHEDULER
from jaxserve.metrics import Snapshot
from jaxserve.scheduler.control.declaration import Control, ControlStruct


class GetMetricsReq(ControlStruct):
    """What each worker has counted since it started."""


class GetMetricsReqOutput(msgspec.Struct):
    snapshot: Snapshot


class Counts(Protocol):
    def metrics_snapshot(self) -> Snapshot: ...


def get_metrics(worker: Counts, request: GetMetricsReq) -> GetMetricsReqOutput:
    return GetMetricsReqOutput(worker.metrics_snapshot())


CONTROL = Control(
    name="get_metrics",
    request=GetMetricsReq,
    reply=GetMetricsReqOutput,
    handlers={SCHEDULER: get_metrics, DETOKENIZER: get_metrics, FRONT: get_metrics},
)
