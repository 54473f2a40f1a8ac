"""PallasGpuLatentAttention: attention over paged latents on NVIDIA Hopper GPUs.

Absorbed, it is the kernel of `mla`: of steps that bring more than a token per row it takes groups of queries as rows, which
share a line of the page table (`query_groups`). Expanded, it is the kernel of `extend`. Rows of latents are written by a
scatter, in place.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jax.typing

from jaxserve.kernels import tuning
from jaxserve.kernels.latent import LatentBackend, part_table
from jaxserve.kernels.latent_parts import Division, ExpandedPart
from jaxserve.kernels.metadata import AttentionMetadata
from jaxserve.kernels.pages import PageArray
from jaxserve.kernels.pallas.gpu.attention import PallasGpuAttention, wrong_chip
from jaxserve.kernels.pallas.gpu.query_groups import QueryGroups
from jaxserve.kernels.spec import AttentionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AbsorbedWork:
    plan: Any  # MlaPlan
    groups: QueryGroups | None  # None: each row has one query


@dataclasses.dataclass(frozen=True)
class PallasGpuLatentAttention(LatentBackend):
    """LatentBackend in Pallas Mosaic GPU, for Hopper. The cache is one array of pages [1, page_size, head_dim]."""

    name: ClassVar[str] = PallasGpuAttention.name
    platforms: ClassVar[tuple[str, ...]] = PallasGpuAttention.platforms
    default_page_size: ClassVar[int] = 64  # a page is one tile

    # A loop of a length that only the GPU knows is some launches more in every layer, or waits of the host. Not measured: with
    # fewer tokens they may cost all that is saved (benchmarks/device, section mla).
    division: Division = dataclasses.field(default=Division(fewest_tokens=1024), kw_only=True)
    interpret: Any = None  # plgpu.InterpretGPUParams in tests
    override: Any = None  # MlaConfig, in tests
    extend_override: Any = None  # ExtendConfig, in tests

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if spec.batch_invariant:
            return "its kernel cuts a row's keys by what else is in the step; --enable-deterministic-inference needs another."
        return wrong_chip(spec) or _wrong_shape(spec)

    @property
    def can_expand(self) -> bool:
        from jaxserve.kernels.pallas.gpu import extend

        spec = self.spec
        if spec.projected is None:
            return False
        reason = extend.unsupported(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_heads,
            head_dim=spec.projected.key_dim,
            head_dim_v=spec.projected.value_dim,
            page_size=spec.page_size or self.default_page_size,
            dtype=spec.dtype,
            kv_dtype=spec.dtype,
            config=self._extend_config(),
        )
        return reason is None

    def kv_pages(self) -> PageArray:
        spec = self.spec
        assert spec.page_size is not None
        return PageArray((spec.num_kv_heads, spec.page_size, spec.head_dim), jnp.dtype(spec.kv_dtype), 0)

    def plan_absorbed(self, step: AttentionMetadata) -> AttentionMetadata:
        from jaxserve.kernels.pallas.gpu import mla

        num_heads, q_len = self.spec.absorbed_heads, 1
        groups, kv_lens, table_rows = None, step.kv_lens, None
        with jax.named_scope("plan_attention"):
            if step.decode_q_len != 1:
                q_len = mla.group_q_len(num_heads)
                groups = QueryGroups.of(step.kv_lens, step.cu_q_lens, step.num_tokens, step.decode_q_len, q_len=q_len)
                kv_lens, table_rows = groups.kv_lens, groups.rows
            plan = mla.plan_mla_decode(kv_lens, table_rows, q_len=q_len, num_heads=num_heads, config=self._mla_config())
            return dataclasses.replace(step.without_padding(), work=AbsorbedWork(plan, groups))

    def write_rows(
        self, rows: jax.Array, kv_cache: jax.Array, plan: AttentionMetadata, page_offset: jax.typing.ArrayLike
    ) -> jax.Array:
        from jaxserve.kernels.pallas.gpu import write

        return write.scatter_rows(kv_cache, rows[:, None], plan.slot_pages, plan.slot_offsets, page_offset)

    def read_rows(self, kv_cache: jax.Array, pages: jax.Array) -> jax.Array:
        return kv_cache.at[pages, 0].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def attend_absorbed(
        self,
        queries: jax.Array,
        kv_cache: jax.Array,
        plan: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
    ) -> jax.Array:
        from jaxserve.kernels.pallas.gpu import mla

        groups: QueryGroups | None = plan.work.groups
        by_row = queries[:, None] if groups is None else groups.cut(queries)
        out = mla.mla_decode(by_row, *self._keys(kv_cache, plan, page_offset), **self._mla_options(scale))
        return out[:, 0] if groups is None else groups.join(out)

    def attend_partly_absorbed(
        self,
        queries: jax.Array,
        kv_cache: jax.Array,
        plan: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
    ) -> tuple[jax.Array, jax.Array]:
        from jaxserve.kernels.pallas.gpu import mla

        assert plan.work.groups is None, "the plan is of rows with several queries"
        keys, options = self._keys(kv_cache, plan, page_offset), self._mla_options(scale)
        out, log_sums = mla.mla_decode_with_log_sums(queries[:, None], *keys, **options)
        return out[:, 0], log_sums[:, 0]

    def plan_expanded(self, part: ExpandedPart, cu_q_lens: jax.Array, num_tokens: int) -> Any:
        from jaxserve.kernels.pallas.gpu import extend

        return extend.plan_extend(
            part.kv_lens,
            cu_q_lens,
            num_tokens,
            group=1,
            min_q_len=self.spec.expanding_pays_from or 1,
            first_positions=part.first_positions,
            with_log_sums=True,
            config=self._extend_config(),
        )

    def attend_expanded(
        self, q: jax.Array, keys: jax.Array, values: jax.Array, part: ExpandedPart, plan: Any, *, scale: float
    ) -> tuple[jax.Array, jax.Array]:
        from jaxserve.kernels.pallas.gpu import extend

        return extend.extend_with_log_sums(
            q,
            jnp.concatenate([keys, values], axis=-1),
            part_table(part, len(part.pages)),
            plan,
            0,
            head_dim_v=values.shape[-1],
            scale=scale,
            config=self._extend_config(),
            interpret=self.interpret,
        )

    @staticmethod
    def _keys(kv_cache: jax.Array, plan: AttentionMetadata, page_offset: jax.typing.ArrayLike) -> tuple[Any, ...]:
        return kv_cache, plan.page_table, plan.work.plan, jnp.asarray(page_offset, jnp.int32)

    def _mla_options(self, scale: float) -> dict[str, Any]:
        return {"scale": scale, "config": self._mla_config(), "interpret": self.interpret}

    def _mla_config(self) -> Any:
        from jaxserve.kernels.pallas.gpu import mla

        return self.override or mla.MlaConfig(num_blocks=self.spec.chip.num_cores)

    def _extend_config(self) -> Any:
        spec = self.spec
        assert spec.projected is not None and spec.page_size is not None
        dims = (spec.projected.key_dim, spec.projected.value_dim)
        shape = tuning.KernelShape(spec.num_heads, spec.num_heads, *dims, spec.page_size, spec.dtype)
        config = self.extend_override or tuning.extend_config(spec.chip.kind, shape)
        return dataclasses.replace(config, num_sms=spec.chip.num_cores) if self.extend_override is None else config


def _wrong_shape(spec: AttentionSpec) -> str | None:
    from jaxserve.kernels.pallas.gpu import mla

    assert spec.page_size is not None and spec.latent_dim is not None
    if spec.windows != (None,) or spec.uses_soft_cap or spec.uses_sinks:
        return "of latents it takes no window, soft cap or sinks."
    if not spec.is_causal:
        return "attention over latents is causal."
    if spec.kv_dtype != spec.dtype:
        return f"it keeps latents in the model's type, {spec.dtype}, not {spec.kv_dtype}."
    reason = mla.unsupported(
        num_heads=spec.absorbed_heads,
        q_len=1,
        latent_dim=spec.latent_dim,
        row_dim=spec.head_dim,
        page_size=spec.page_size,
        dtype=spec.dtype,
    )
    return None if reason is None else f"{reason}."
