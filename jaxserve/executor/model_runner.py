"""ModelRunner: the Runner that has a model. Packs steps, launches compiled programs, fetches what they sampled.

It owns the device state and the only copy of the weights; it knows rows and pages, not requests. Launching returns before
the step has run: the state is a chain of futures, so steps run in launch order without the host waiting for any of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.executor.buckets import Buckets
from jaxserve.executor.forward_batch import Bucket, no_page_updates, pack, packed_len
from jaxserve.executor.row_params import NUM_ROW_PARAMS, row_params_from_state
from jaxserve.executor.row_tables import RowTables, needs_tables, pack_row, packed_row_shape, write_row
from jaxserve.executor.sampler import SampledTokens
from jaxserve.executor.step import Params, Step, StepState, write_page_table
from jaxserve.executor.warmup import CompileCounter, compile_all
from jaxserve.runner import PageUpdates, RunnerSpec, StepInput, StepOutput
from jaxserve.types import ForwardMode

# Page-table entries written by one call of the program for what does not fit a step's own updates (long prefix hits).
PAGE_UPDATE_CHUNK = 1024


@dataclasses.dataclass(frozen=True)
class PendingStep:
    """A launched step: its device results, and what of them the scheduler will want."""

    sampled: SampledTokens
    num_rows: int
    needs_logprobs: bool
    needs_top_logprobs: bool


class ModelRunner:
    def __init__(
        self,
        *,
        step: Step,
        params: Params,
        param_specs: Any,
        kv_shape: tuple[int, ...],
        kv_spec: PartitionSpec,
        kv_dtype: Any,
        mesh: Mesh,
        buckets: Buckets,
        spec: RunnerSpec,
        compile_counter: CompileCounter,
    ) -> None:
        self.spec = spec
        self._params = params
        self._mesh = mesh
        self._buckets = buckets
        self._counter = compile_counter
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._scratch_row = spec.max_rows
        self._row_params = np.zeros((spec.max_rows + 1, NUM_ROW_PARAMS), np.int32)
        self._state_shapes = _state_shapes(spec, kv_shape, kv_dtype)
        self._state_specs = dataclasses.replace(
            jax.tree.map(lambda _: PartitionSpec(), self._state_shapes),
            kv=kv_spec,
        )
        self._programs = _Programs(step, param_specs, self._state_specs, mesh)

    # --- start-up

    def lower(self, bucket: Bucket) -> jax.stages.Lowered:
        packed = self._packed_shape(packed_len(bucket))
        return self._programs.step(bucket).lower(self._params, self._sharded_state_shapes(), packed)

    def _packed_shape(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._replicated)

    def warm_up(self, *, show_progress: bool = True) -> None:
        """Compiles and runs every program once. Nothing compiles after this."""
        shapes = self._sharded_state_shapes()
        updates = self._packed_shape(3, PAGE_UPDATE_CHUNK)
        row = self._packed_shape(*packed_row_shape())
        lower: dict[Any, Any] = {bucket: (lambda b=bucket: self.lower(b)) for bucket in self._buckets.all}
        lower["page_table"] = lambda: self._programs.page_table.lower(shapes.page_table, updates)
        lower["row_tables"] = lambda: self._programs.row_tables.lower(shapes.tables, row)
        compiled = compile_all(lower, show_progress=show_progress)
        self._page_table_program = compiled.pop("page_table")
        self._row_tables_program = compiled.pop("row_tables")
        self._step_programs: dict[Bucket, jax.stages.Compiled] = compiled
        self._state: StepState = self._empty_state()
        self._run_everything_once()
        self._counter.mark_ready()

    def _run_everything_once(self) -> None:
        """What a program does at its first run (loading, allocating) should not happen while serving."""
        for bucket in self._buckets.all:
            self._run(bucket, _padding_only(bucket, self._scratch_row))
        self._write_page_table(no_page_updates(self._scratch_row, PAGE_UPDATE_CHUNK))
        self._write_row_tables([np.zeros(packed_row_shape(), np.int32)])
        jax.block_until_ready(self._state)

    # --- Runner

    def launch(self, step: StepInput) -> PendingStep:
        for state in step.new_rows:
            self._row_params[state.row] = row_params_from_state(state)
            if needs_tables(state):
                self._write_row_tables(pack_row(state, self.spec.vocab_size))
        bucket = self._buckets.choose(step)
        step = self._write_excess_page_updates(step, bucket)
        sampled = self._run(bucket, pack(step, bucket, self._row_params[step.rows], self._scratch_row))
        if not self._on_cpu:
            sampled.next_token_ids.copy_to_host_async()
        return PendingStep(sampled, step.num_rows, step.needs_logprobs, step.needs_top_logprobs)

    def fetch(self, handle: PendingStep) -> StepOutput:
        sampled, live = handle.sampled, handle.num_rows
        has_top = handle.needs_top_logprobs
        return StepOutput(
            next_token_ids=np.asarray(sampled.next_token_ids)[:live],
            logprobs=np.asarray(sampled.logprobs)[:live] if handle.needs_logprobs else None,
            top_ids=np.asarray(sampled.top_ids)[:live] if has_top else None,
            top_logprobs=np.asarray(sampled.top_logprobs)[:live] if has_top else None,
        )

    def internal_state(self) -> dict[str, Any]:
        leaves = jax.tree.leaves(self._params)
        devices = self._mesh.devices.size
        return {
            "device": f"{devices} x {self._mesh.devices.flat[0].device_kind}",
            "memory_usage": {
                "weight_gb": sum(leaf.nbytes for leaf in leaves) / 1e9,
                "kvcache_gb": self._state.kv.nbytes / 1e9,
                "token_capacity": self.spec.max_total_tokens,
            },
            "buckets": [bucket.name for bucket in self._buckets.all],
            "compiles_total": self._counter.count,
            "compiles_after_ready_total": self._counter.after_ready,
        }

    # --- inside

    @property
    def _on_cpu(self) -> bool:
        return self._mesh.devices.flat[0].platform == "cpu"

    def _run(self, bucket: Bucket, packed: np.ndarray) -> SampledTokens:
        self._state, sampled = self._step_programs[bucket](self._params, self._state, packed)
        return sampled

    def _write_row_tables(self, buffers: list[np.ndarray]) -> None:
        for packed in buffers:
            tables = self._row_tables_program(self._state.tables, packed)
            self._state = dataclasses.replace(self._state, tables=tables)

    def _write_page_table(self, packed: np.ndarray) -> None:
        table = self._page_table_program(self._state.page_table, packed)
        self._state = dataclasses.replace(self._state, page_table=table)

    def _write_excess_page_updates(self, step: StepInput, bucket: Bucket) -> StepInput:
        """Long prefix hits bring more page-table entries than a step has room for: those go ahead of it."""
        updates = step.page_updates
        excess = len(updates.rows) - bucket.num_page_updates
        if excess <= 0:
            return step
        for start in range(0, excess, PAGE_UPDATE_CHUNK):
            part = slice(start, min(start + PAGE_UPDATE_CHUNK, excess))
            packed = no_page_updates(self._scratch_row, PAGE_UPDATE_CHUNK)
            packed[:, : part.stop - part.start] = updates.rows[part], updates.index[part], updates.pages[part]
            self._write_page_table(packed)
        rest = PageUpdates(updates.rows[excess:], updates.index[excess:], updates.pages[excess:])
        return dataclasses.replace(step, page_updates=rest)

    def _empty_state(self) -> StepState:
        shapes = self._state_shapes
        shardings = jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), self._state_specs)
        make = jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), out_shardings=shardings)
        return make()

    def _sharded_state_shapes(self) -> StepState:
        def with_sharding(shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(self._mesh, spec))

        return jax.tree.map(with_sharding, self._state_shapes, self._state_specs)


class _Programs:
    """The jitted functions, not yet compiled."""

    def __init__(self, step: Step, param_specs: Any, state_specs: StepState, mesh: Mesh) -> None:
        self._step = step
        self._mesh = mesh
        self._in_specs = (param_specs, state_specs, PartitionSpec())
        self._out_specs = (state_specs, PartitionSpec())
        self.page_table = jax.jit(write_page_table, donate_argnums=0)
        self.row_tables = jax.jit(write_row, donate_argnums=0)

    def step(self, bucket: Bucket) -> Any:
        def run(params: Params, state: StepState, packed: jax.Array) -> tuple[StepState, SampledTokens]:
            return self._step(params, state, packed, bucket)

        sharded = jax.shard_map(run, mesh=self._mesh, in_specs=self._in_specs, out_specs=self._out_specs, check_vma=False)
        return jax.jit(sharded, donate_argnums=1)


def _state_shapes(spec: RunnerSpec, kv_shape: tuple[int, ...], kv_dtype: Any) -> StepState:
    num_rows = spec.max_rows + 1
    return StepState(
        kv=jax.ShapeDtypeStruct(kv_shape, kv_dtype),  # type: ignore[arg-type]
        page_table=jax.ShapeDtypeStruct((num_rows, spec.max_pages_per_row), jnp.int32),  # type: ignore[arg-type]
        next_tokens=jax.ShapeDtypeStruct((num_rows,), jnp.int32),  # type: ignore[arg-type]
        tables=RowTables.shapes(num_rows, spec.vocab_size),
    )


def _padding_only(bucket: Bucket, scratch_row: int) -> np.ndarray:
    """A packed step without a live row."""
    nothing = np.zeros(0, np.int32)
    step = StepInput(
        mode=ForwardMode.IDLE,
        rows=nothing,
        seq_lens=nothing,
        extend_lens=nothing,
        num_decode_rows=0,
        input_ids=nothing,
        sample=np.zeros(0, bool),
        page_updates=PageUpdates(nothing, nothing, nothing),
        new_rows=[],
        needs_sampling=False,
        needs_adjusting=False,
        needs_logprobs=False,
        needs_top_logprobs=False,
    )
    return pack(step, bucket, np.zeros((0, NUM_ROW_PARAMS), np.int32), scratch_row)
