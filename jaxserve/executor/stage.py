"""A stage of a pipeline, and what it has on its devices; and a stage that other hosts have.

Both can be asked for the same things, as all hosts launch the same steps. What a distant stage makes is known by its shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.executor.forward_batch import Bucket
from jaxserve.executor.input_embeds import pack_embeds
from jaxserve.executor.logit_lines import LogitsKey, padded, padded_logits, parts_of
from jaxserve.executor.mesh import platform_of, spans_processes
from jaxserve.executor.pooling import PoolingKey, pack_pooling
from jaxserve.executor.programs import HISTORY_CHUNK, ProgramKey, SamplingKey, StepPrograms
from jaxserve.executor.sampling import Continuation, Forwarded, Sampled, SamplingState
from jaxserve.executor.scoring import ScoredLines, ScoringKey, StepHidden, pack_query, pack_slots
from jaxserve.executor.step import AdaptedParams, ForwardState, HandedOn, Params
from jaxserve.runner import EmbeddedTokens, LogitLines, PoolQuery, ScoreQuery


class Stage(Protocol):
    """What a step asks of a stage: of the first one to go on from what was sampled and to take embeddings, of the last one to
    sample and score."""

    mesh: Mesh

    @property
    def keys(self) -> Collection[ProgramKey]:
        """Of the programs that are there."""
        ...

    def forward(self, bucket: Bucket, start: Any, packed: np.ndarray) -> HandedOn | Forwarded | None:
        """`start`: a HandedOn, or a Continuation for the first stage; None: this stage samples as well, and knows. Without
        logits nothing comes of the last one."""
        ...

    def sample(self, key: SamplingKey, forwarded: Forwarded, masks: np.ndarray | None) -> Sampled:
        """`masks` None: any token may follow."""
        ...

    def read_logits(self, logits: jax.Array, lines: np.ndarray) -> list[jax.Array]:
        """Parts, one behind the other, with lines of no meaning behind the last."""
        ...

    def write_logits(self, logits: jax.Array, changed: LogitLines) -> jax.Array: ...

    def score(self, key: ScoringKey, query: ScoreQuery) -> list[ScoredLines]:
        """For `unpack_scores`."""
        ...

    def copy_hidden(self, slots: np.ndarray) -> list[jax.Array]:
        """For `unpack_lines`."""
        ...

    def copy_experts(self, slots: np.ndarray) -> list[jax.Array]:
        """For `unpack_lines`."""
        ...

    def pool(self, key: PoolingKey, query: PoolQuery, *, of_tokens: bool) -> list[jax.Array]:
        """For `unpack_pooled`."""
        ...

    def write_embeds(self, embeds: EmbeddedTokens) -> None: ...

    def write_row_tables(self, buffers: list[np.ndarray]) -> None: ...

    def write_history(self, row: int, token_ids: np.ndarray) -> None: ...

    def keep_no_masks(self, num_lines: int, mask_words: int) -> None:
        """For steps with so many lines of logits, of which none is masked."""
        ...

    def no_continuation(self) -> Continuation:
        """What rows go on from before anything was sampled."""
        ...


class RunningStage:
    """On devices of this host, all of them or some."""

    def __init__(self, mesh: Mesh, programs: dict[ProgramKey, Any], params: Params, described: StepPrograms) -> None:
        """`programs`: compiled, of those that are `described`."""
        self.mesh = mesh
        self.programs = dict(programs)
        self.params: Params | None = params  # None: released
        self.state: ForwardState
        self.sampling: SamplingState | None  # where tokens are sampled
        self.state, self.sampling = self.programs["empty_state"]()
        self.adapters = self.programs["empty_adapters"]() if "empty_adapters" in self.programs else None  # slots of them
        self._described = described
        self._pooled_sums = self.programs["pooled_sums"]() if "pooled_sums" in self.programs else None
        # By lines: what a step without a grammar brings to a program that takes masks (`keep_no_masks`).
        self._no_masks: dict[int, jax.Array] = {}

    @property
    def keys(self) -> Collection[ProgramKey]:
        return self.programs.keys()

    @property
    def on_cpu(self) -> bool:
        return platform_of(self.mesh) == "cpu"

    def forward(self, bucket: Bucket, start: Any, packed: np.ndarray) -> HandedOn | Forwarded | None:
        made: HandedOn | Forwarded | None
        start = self._sampling.continuation if start is None else start
        self.state, made = self.programs[bucket](self._params(adapts=bucket.adapts), self.state, start, packed)
        return made

    def sample(self, key: SamplingKey, forwarded: Forwarded, masks: np.ndarray | None) -> Sampled:
        words: Any = masks
        if key.mode.takes_masks and masks is None:
            words = self._no_masks[key.num_rows * key.tokens_per_row]
        sampled: Sampled
        self.sampling, sampled = self.programs[key](self._sampling, forwarded, words)
        return sampled

    def read_logits(self, logits: jax.Array, lines: np.ndarray) -> list[jax.Array]:
        program = self.programs[LogitsKey(len(logits), writes=False)]
        return [program(logits, padded(lines[part], fill=0)) for part in parts_of(lines)]

    def write_logits(self, logits: jax.Array, changed: LogitLines) -> jax.Array:
        nowhere, program = len(logits), self.programs[LogitsKey(len(logits), writes=True)]
        for part in parts_of(changed.lines):
            logits = program(logits, padded(changed.lines[part], fill=nowhere), padded_logits(changed.logits[part]))
        return logits

    def score(self, key: ScoringKey, query: ScoreQuery) -> list[ScoredLines]:
        program, scored = self.programs[key], []
        hidden = StepHidden(self.state.hidden, self.state.adapter_slots)  # type: ignore[arg-type]
        params = self._params(adapts=hidden.adapter_slots is not None)
        for packed in pack_query(query, key.num_lines):
            scored.append(program(params, hidden, packed))
            if self.on_cpu and spans_processes(self.mesh):  # too many collectives at a time, and gloo's threads wait forever
                jax.block_until_ready(scored[-1])
        return scored

    def _params(self, *, adapts: bool) -> Params | AdaptedParams | None:
        """What a program gets as weights."""
        return AdaptedParams(self.params, self.adapters) if adapts else self.params  # type: ignore[arg-type]

    def copy_hidden(self, slots: np.ndarray) -> list[jax.Array]:
        program = self.programs["hidden_states"]
        return [program(self.state.hidden, packed) for packed in pack_slots(slots)]

    def copy_experts(self, slots: np.ndarray) -> list[jax.Array]:
        program = self.programs["routed_experts"]
        return [program(self.state.experts, packed) for packed in pack_slots(slots)]

    def pool(self, key: PoolingKey, query: PoolQuery, *, of_tokens: bool) -> list[jax.Array]:
        vectors = []
        for packed in pack_pooling(query, key.num_lines, of_tokens=of_tokens):
            pooled = self.programs[key](self.params, self.state.hidden, self._pooled_sums, packed)
            self._pooled_sums = pooled.sums
            vectors.append(pooled.vectors)
        return vectors

    def write_embeds(self, embeds: EmbeddedTokens) -> None:
        for first_slot, lines in pack_embeds(embeds):
            hidden = self.programs["input_embeds"](self.state.hidden, first_slot, lines)
            self.state = dataclasses.replace(self.state, hidden=hidden)

    def write_adapter(self, slot: int, filled: Any) -> None:
        """`filled`: NumPy arrays for one slot, whole."""

        def put(array: np.ndarray, shape: jax.ShapeDtypeStruct) -> jax.Array:
            return jax.make_array_from_callback(array.shape, shape.sharding, lambda index: array[index])

        arrays = jax.tree.map(put, filled, self._described.filled_slot_shapes())
        self.adapters = self.programs["adapter"](self.adapters, np.array(slot, np.int32), arrays)

    def write_no_adapter(self) -> None:
        """Zeros, where no adapter is yet."""
        shapes = self._described.filled_slot_shapes()
        self.write_adapter(0, jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), shapes))

    def write_page_table(self, packed: np.ndarray) -> None:
        table = self.programs["page_table"](self.state.page_table, packed)
        self.state = dataclasses.replace(self.state, page_table=table)

    def write_row_tables(self, buffers: list[np.ndarray]) -> None:
        for packed in buffers:
            tables = self.programs["row_tables"](self._sampling.tables, packed)
            self.sampling = dataclasses.replace(self._sampling, tables=tables)

    def write_history(self, row: int, token_ids: np.ndarray) -> None:
        for start in range(0, len(token_ids), HISTORY_CHUNK):
            packed = np.zeros(2 + HISTORY_CHUNK, np.int32)
            part = token_ids[start : start + HISTORY_CHUNK]
            packed[:2], packed[2 : 2 + len(part)] = (row, start), part
            history = self.programs["history"](self._sampling.history, packed)
            self.sampling = dataclasses.replace(self._sampling, history=history)

    def keep_no_masks(self, num_lines: int, mask_words: int) -> None:
        if num_lines not in self._no_masks:
            allowed = np.full((num_lines, mask_words), -1, np.int32)
            self._no_masks[num_lines] = jax.device_put(allowed, NamedSharding(self.mesh, PartitionSpec()))

    def no_continuation(self) -> Continuation:
        nothing: Continuation = jax.tree.map(
            lambda shape: jax.device_put(np.zeros(shape.shape, shape.dtype), shape.sharding), self._described.continuation()
        )
        return nothing

    def close(self) -> None:
        """Gives up all that is on the devices. Steps that were launched compute to their end."""
        arrays = (self.params, self.state, self.sampling, self.adapters, self._pooled_sums, self._no_masks)
        for array in jax.tree.leaves(arrays):
            array.delete()
        self.params = self.sampling = self.adapters = self._pooled_sums = None
        self.state = dataclasses.replace(self.state, kv=None)
        self._no_masks.clear()
        self.programs.clear()

    @property
    def _sampling(self) -> SamplingState:
        assert self.sampling is not None, "the last stage samples"
        return self.sampling


class DistantStage:
    """On devices of other hosts, which have it there as a RunningStage."""

    def __init__(self, mesh: Mesh, keys: Collection[ProgramKey], described: StepPrograms) -> None:
        """`keys`: of the programs that they have."""
        self.mesh = mesh
        self.keys = keys
        self._outputs = functools.cache(described.outputs)
        self._described = described

    def forward(self, bucket: Bucket, start: Any, packed: np.ndarray) -> HandedOn | Forwarded | None:
        made: HandedOn | Forwarded | None = self._outputs(bucket)
        return made

    def sample(self, key: SamplingKey, forwarded: Forwarded, masks: np.ndarray | None) -> Sampled:
        sampled: Sampled = self._outputs(key)
        return sampled

    def read_logits(self, logits: jax.Array, lines: np.ndarray) -> list[jax.Array]:
        return [self._outputs(LogitsKey(len(logits), writes=False)) for _ in parts_of(lines)]

    def write_logits(self, logits: jax.Array, changed: LogitLines) -> jax.Array:
        return logits

    def score(self, key: ScoringKey, query: ScoreQuery) -> list[ScoredLines]:
        return [self._outputs(key) for _ in pack_query(query, key.num_lines)]

    def copy_hidden(self, slots: np.ndarray) -> list[jax.Array]:
        return [self._outputs("hidden_states") for _ in pack_slots(slots)]

    def copy_experts(self, slots: np.ndarray) -> list[jax.Array]:
        raise AssertionError("a stage of a pipeline tells no experts")

    def pool(self, key: PoolingKey, query: PoolQuery, *, of_tokens: bool) -> list[jax.Array]:
        return [self._outputs(key) for _ in pack_pooling(query, key.num_lines, of_tokens=of_tokens)]

    def write_embeds(self, embeds: EmbeddedTokens) -> None:
        pass

    def write_row_tables(self, buffers: list[np.ndarray]) -> None:
        pass

    def write_history(self, row: int, token_ids: np.ndarray) -> None:
        pass

    def keep_no_masks(self, num_lines: int, mask_words: int) -> None:
        pass

    def no_continuation(self) -> Continuation:
        return self._described.continuation()
