"""Pipeline: a model's stages, each on devices of its own, and what goes between them. A model that is not divided has one.

A step is launched in all stages at once, which never waits: each has its programs and its part of the state, and computes when
what the one before hands on has arrived. So several steps are under way at a time, as long as none needs the tokens of another.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.executor.forward_batch import Bucket
from jaxserve.executor.programs import ProgramKey
from jaxserve.executor.sampling import Continuation, Forwarded, SamplingState
from jaxserve.executor.step import ForwardState, HandedOn, Params
from jaxserve.models import DATA_AXIS
from jaxserve.runner import RunnerSpec


@dataclasses.dataclass
class RunningStage:
    """What one stage has on its devices."""

    mesh: Mesh
    programs: dict[ProgramKey, Any]  # compiled
    params: Params | None  # None: released
    state: ForwardState

    def forward(self, bucket: Bucket, start: Continuation | HandedOn, packed: np.ndarray) -> HandedOn | Forwarded:
        made: HandedOn | Forwarded
        self.state, made = self.programs[bucket](self.params, self.state, start, packed)
        return made

    def receive(self, handed_on: HandedOn) -> HandedOn:
        """On these devices."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        inputs = jax.tree.map(lambda _: whole, handed_on.inputs)
        shardings = HandedOn(NamedSharding(self.mesh, PartitionSpec(DATA_AXIS)), inputs)  # type: ignore[arg-type]
        received: HandedOn = jax.device_put(handed_on, shardings)
        return received


class LoadedStage(NamedTuple):
    """What a stage begins with."""

    mesh: Mesh
    programs: dict[ProgramKey, Any]  # compiled
    params: Params


def start_pipeline(loaded: Sequence[LoadedStage], spec: RunnerSpec) -> Pipeline:
    """With empty states."""
    stages, sampling = [], None
    for mesh, programs, params in loaded:
        state, sampling = programs["empty_state"]()
        stages.append(RunningStage(mesh, dict(programs), params, state))
    assert sampling is not None, "the last stage samples"
    return Pipeline(stages, sampling, spec.max_rows)


class Pipeline:
    """The stages, first to last; and the state of the sampling half, which the last one has."""

    def __init__(self, stages: Sequence[RunningStage], sampling: SamplingState, max_rows: int) -> None:
        self.stages = tuple(stages)
        self.sampling = sampling
        self._continuations = _Continuations(self.first.mesh, max_rows, len(stages) + 1) if len(stages) > 1 else None
        if self._continuations is not None:
            self._continuations.add(np.zeros(0, np.int32), sampling.continuation)

    @property
    def first(self) -> RunningStage:
        return self.stages[0]

    @property
    def last(self) -> RunningStage:
        return self.stages[-1]

    def forward(self, bucket: Bucket, decode_rows: np.ndarray, packed: np.ndarray) -> Forwarded:
        """`decode_rows`: the request rows that go on from what was sampled for them last."""
        start: Continuation | HandedOn = self.sampling.continuation
        if self._continuations is not None:
            start = self._continuations.of(decode_rows)
        made = self.first.forward(bucket, start, packed)
        for stage in self.stages[1:]:
            assert isinstance(made, HandedOn)
            made = stage.forward(bucket, stage.receive(made), packed)
        assert isinstance(made, Forwarded)
        return made

    def sampled(self, rows: np.ndarray) -> None:
        """For these request rows; `sampling` knows it."""
        if self._continuations is not None:
            self._continuations.add(rows, self.sampling.continuation)


class _Continuations:
    """What rows go on from, for the first stage, as of the last few steps.

    The newest would do for every step, but exists only when the newest step has left the last stage; a step that has to wait
    for no other gets the one that has its own rows.
    """

    def __init__(self, mesh: Mesh, max_rows: int, most: int) -> None:
        self._sharding = NamedSharding(mesh, PartitionSpec())
        self._kept: collections.deque[tuple[int, Continuation]] = collections.deque(maxlen=most)
        self._num_steps = 0
        self._sampled_in = np.zeros(max_rows, np.int64)  # the number of the last step that sampled the row

    def add(self, rows: np.ndarray, continuation: Continuation) -> None:
        self._num_steps += 1
        self._sampled_in[rows] = self._num_steps
        self._kept.append((self._num_steps, jax.device_put(continuation, self._sharding)))

    def of(self, rows: np.ndarray) -> Continuation:
        needed = self._sampled_in[rows].max(initial=0)
        return next(continuation for number, continuation in self._kept if number >= needed)
