"""StepPrograms: the jitted functions a runner launches, and the shapes they are compiled for. Holds no arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.executor.compiler_options import compiler_options
from jaxserve.executor.forward_batch import Bucket, packed_len
from jaxserve.executor.kv_cache import KVCacheLayout
from jaxserve.executor.mesh import platform_of
from jaxserve.executor.row_params import NUM_ROW_PARAMS
from jaxserve.executor.row_tables import RowTables, packed_row_shape, write_row
from jaxserve.executor.sampler import SamplingMode
from jaxserve.executor.step import Forwarded, ForwardState, Params, SamplingState, Step, sample_rows, write_page_table
from jaxserve.runner import RunnerSpec

# Page-table entries written by one call of the program for what does not fit a step's own updates (long prefix hits).
PAGE_UPDATE_CHUNK = 1024

_WHOLE = PartitionSpec()


class StepPrograms:
    def __init__(self, step: Step, param_specs: Any, kv_cache: KVCacheLayout, spec: RunnerSpec, mesh: Mesh) -> None:
        self._step = step
        self._param_specs = param_specs
        self._kv_cache = kv_cache
        self._spec = spec
        self._mesh = mesh
        self._state_specs = ForwardState(kv_cache.specs(), _WHOLE)  # type: ignore[arg-type]

    def lower_forward(self, bucket: Bucket, params: Params) -> Any:
        """A jax.stages.Lowered of (params, forward state, next tokens, packed) -> (forward state, Forwarded).

        `params` may be shapes with shardings.
        """

        def run(params: Params, state: ForwardState, next_tokens: jax.Array, packed: jax.Array) -> Any:
            return self._step(params, state, next_tokens, packed, bucket)

        sharded = jax.shard_map(
            run,
            mesh=self._mesh,
            in_specs=(self._param_specs, self._state_specs, _WHOLE, _WHOLE),
            out_specs=(self._state_specs, _WHOLE),
            check_vma=False,
        )
        packed = self._whole((packed_len(bucket),))
        return self._jit(sharded, donated=1).lower(params, self._forward_state(), self._next_tokens(), packed)

    def lower_sampling(self, num_rows: int, mode: SamplingMode) -> Any:
        """Of (sampling state, Forwarded) -> (sampling state, SampledTokens)."""
        num_top = self._spec.max_top_logprobs

        def run(state: SamplingState, forwarded: Forwarded) -> Any:
            return sample_rows(state, forwarded, mode, num_top)

        line = self._whole((num_rows,))
        forwarded = Forwarded(
            logits=self._whole((num_rows, self._spec.vocab_size), jnp.float32),
            rows=line,
            seq_lens=line,
            sample=line,
            row_params=self._whole((num_rows, NUM_ROW_PARAMS)),
        )
        return self._jit(run, donated=0).lower(self._sampling_state(), forwarded)

    def lower_page_table(self) -> Any:
        """Of (page table, int32 [3, PAGE_UPDATE_CHUNK]) -> page table."""
        updates = self._whole((3, PAGE_UPDATE_CHUNK))
        return self._jit(write_page_table, donated=0).lower(self._forward_state().page_table, updates)

    def lower_row_tables(self) -> Any:
        """Of (row tables, a packed row) -> row tables."""
        return self._jit(write_row, donated=0).lower(self._sampling_state().tables, self._whole(packed_row_shape()))

    def empty_state(self) -> tuple[ForwardState, SamplingState]:
        """Zeros, on the mesh's devices."""
        shapes = self._forward_state(), self._sampling_state()
        make = jax.jit(
            lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
            out_shardings=jax.tree.map(lambda s: s.sharding, shapes),
        )
        return make()

    def _jit(self, function: Any, *, donated: int) -> Any:
        return jax.jit(function, donate_argnums=donated, compiler_options=compiler_options(platform_of(self._mesh)))

    @property
    def _num_rows(self) -> int:
        return self._spec.max_rows + 1

    def _forward_state(self) -> ForwardState:
        kv = jax.tree.map(self._shape, self._kv_cache.shapes(), self._kv_cache.specs())
        return ForwardState(kv, self._whole((self._num_rows, self._spec.max_pages_per_row)))

    def _sampling_state(self) -> SamplingState:
        tables = RowTables.shapes(self._num_rows, self._spec.vocab_size)
        return SamplingState(self._next_tokens(), jax.tree.map(lambda shape: self._shape(shape, _WHOLE), tables))

    def _next_tokens(self) -> Any:
        return self._whole((self._num_rows,))

    def _whole(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return self._shape(jax.ShapeDtypeStruct(shape, dtype), _WHOLE)

    def _shape(self, shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(self._mesh, spec))
