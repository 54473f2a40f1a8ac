"""Pipeline: a model's stages, each on devices of its own, and what goes between them. A model that is not divided has one.

A step is launched in all stages at once, which never waits: each has its programs and its part of the state, and computes when
what the one before hands on has arrived. So several steps are under way at a time, as long as none needs the tokens of another.

Over several hosts each has the stages that are on devices of its own, and of the others what their programs would give. All
launch the same steps; host 0 reads the results, wherever they were made, from copies on the first stage's devices.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.executor.forward_batch import Bucket
from jaxserve.executor.mesh import is_here, platform_of, processes_of
from jaxserve.executor.programs import SamplingKey
from jaxserve.executor.sampler import SampledTokens
from jaxserve.executor.sampling import Continuation, Forwarded
from jaxserve.executor.stage import RunningStage, Stage
from jaxserve.executor.step import HandedOn
from jaxserve.models import DATA_AXIS
from jaxserve.runner import RunnerSpec

Tree = TypeVar("Tree")


class Pipeline:
    """The stages, first to last; the last one samples."""

    def __init__(self, stages: Sequence[Stage], spec: RunnerSpec) -> None:
        self.stages = tuple(stages)
        self.first, self.last = self.stages[0], self.stages[-1]
        self.own = [stage for stage in self.stages if isinstance(stage, RunningStage)]
        self._ways = [_Way(sender.mesh, receiver.mesh) for sender, receiver in itertools.pairwise(stages)]
        self._back = _Way(self.last.mesh, self.first.mesh)
        self._made_here: Any = None  # by the newest step, if other hosts have other stages
        self._continuations = _Continuations(self.first, spec.max_rows, len(stages) + 1) if len(stages) > 1 else None
        self._nothing = None if spec.generates else self.first.no_continuation()  # made before anybody waits for it

    def forward(self, bucket: Bucket, decode_rows: np.ndarray, packed: np.ndarray) -> Forwarded | None:
        """`decode_rows`: the request rows that go on from what was sampled for them last. None: the model has no logits."""
        start = self._nothing if self._continuations is None else self._continuations.of(decode_rows)
        made = self.first.forward(bucket, start, packed)
        for sender, way, receiver in zip(self.stages, self._ways, self.stages[1:], strict=False):
            self._note(sender, made)
            made = receiver.forward(bucket, way.send(made), packed)
        assert not isinstance(made, HandedOn)
        return made

    def sample(self, key: SamplingKey, forwarded: Forwarded, masks: np.ndarray | None, rows: np.ndarray) -> SampledTokens:
        """For host 0 to read, as what `to_reader` gives. `rows`: the step's request rows."""
        sampled = self.last.sample(key, forwarded, masks)
        self._note(self.last, sampled.tokens)
        if self._continuations is None:
            return sampled.tokens
        back = self._back
        tokens, continuation = back.send(sampled) if back.crosses else (sampled.tokens, back.send(sampled.continuation))
        assert continuation is not None
        self._continuations.add(rows, continuation)
        return tokens

    def to_reader(self, made: Tree) -> Tree:
        """What the last stage has made, where host 0 can read it; on some hosts it is shapes alone."""
        return self._back.send(made) if self._back.crosses else made

    def show_failure(self) -> None:
        """Raises what a step has raised here, as soon as that is known, where nobody here waits for results."""
        if all(leaf.is_ready() for leaf in jax.tree.leaves(self._made_here)):
            jax.block_until_ready(self._made_here)

    def close(self) -> None:
        """Waits for what was launched, and gives up all that is on the devices of stages here."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # whoever fetches a step that failed hears of it
            jax.block_until_ready([(stage.state, stage.sampling) for stage in self.own])
        for stage in self.own:
            stage.close()
        for array in jax.tree.leaves((self._nothing, self._continuations and self._continuations.kept)):
            if isinstance(array, jax.Array):
                array.delete()
        self._nothing = self._continuations = self._made_here = None

    def _note(self, stage: Stage, made: Any) -> None:
        if len(self.own) < len(self.stages) and isinstance(stage, RunningStage):
            self._made_here = made

    def write_page_table(self, packed: np.ndarray) -> None:
        for stage in self.own:
            stage.write_page_table(packed)


class _Way:
    """From the devices of a stage to those of another.

    Where it leads over hosts, all hosts say so to JAX in the same order, also those that have none of the devices: JAX finds
    the two ends of a transfer by counting.
    """

    def __init__(self, sender: Mesh, receiver: Mesh) -> None:
        self.crosses = processes_of(sender) != processes_of(receiver)
        self._sends_here = is_here(sender)
        # On CPU JAX waits for other hosts in the threads that compute; several transfers at a time would leave none for that.
        self._waits = self.crosses and is_here(receiver) and platform_of(receiver) == "cpu"
        self._whole = NamedSharding(receiver, PartitionSpec())
        self._by_shard = NamedSharding(receiver, PartitionSpec(DATA_AXIS))

    def send(self, made: Tree) -> Tree:
        """Arrays there, which hosts that have none of those devices can but pass on."""
        if not self.crosses and not self._sends_here:
            return made
        shardings = jax.tree.map(lambda _: self._whole, made)
        if isinstance(made, HandedOn):
            shardings = dataclasses.replace(shardings, x=self._by_shard)
        received: Tree = jax.device_put(jax.tree.map(_as_array, made), shardings)
        return jax.block_until_ready(received) if self._waits else received


def _as_array(made: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Without parts here, of what was made elsewhere."""
    if isinstance(made, jax.Array):
        return made
    assert made.sharding is not None
    return jax.make_array_from_single_device_arrays(made.shape, made.sharding, [], dtype=made.dtype)


class _Continuations:
    """What rows go on from, for the first stage, as of the last few steps.

    The newest would do for every step, but exists only when the newest step has left the last stage; a step that has to wait
    for no other gets the one that has its own rows.
    """

    def __init__(self, first: Stage, max_rows: int, most: int) -> None:
        self._kept: collections.deque[tuple[int, Continuation]] = collections.deque(maxlen=most)
        self._num_steps = 0
        self._sampled_in = np.zeros(max_rows, np.int64)  # the number of the last step that sampled the row
        self._kept.append((0, first.no_continuation()))

    @property
    def kept(self) -> list[Continuation]:
        return [continuation for _, continuation in self._kept]

    def add(self, rows: np.ndarray, continuation: Continuation) -> None:
        self._num_steps += 1
        self._sampled_in[rows] = self._num_steps
        self._kept.append((self._num_steps, continuation))

    def of(self, rows: np.ndarray) -> Continuation:
        needed = self._sampled_in[rows].max(initial=0)
        return next(continuation for number, continuation in self._kept if number >= needed)
