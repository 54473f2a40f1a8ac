"""The backends of TPUs, for keys and values per head and for latents; they put together what the other modules here hold."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import jax.typing

from jaxserve.kernels.latent import LatentBackend, part_table
from jaxserve.kernels.latent_parts import ExpandedPart
from jaxserve.kernels.metadata import AttentionMetadata
from jaxserve.kernels.pages import PageArray
from jaxserve.kernels.pallas import both_ways
from jaxserve.kernels.pallas.tpu.attention import decode_attention, extend_attention, paged_attention
from jaxserve.kernels.pallas.tpu.layout import RowLayout
from jaxserve.kernels.pallas.tpu.mla import write_latents
from jaxserve.kernels.pallas.tpu.plan import PassPlan, plan_pass, plan_step
from jaxserve.kernels.pallas.tpu.tuning import (
    ExpandedConfig,
    TpuConfig,
    choose_config,
    expanded_config,
    layout_of,
    unsupported,
)
from jaxserve.kernels.pallas.tpu.write import write_rows
from jaxserve.kernels.rotary import Rotary, quantize_rows, split_and_rotate
from jaxserve.kernels.spec import QUANTIZED_DTYPES, AttentionSpec


class TpuKV(NamedTuple):
    """The KV cache; pages as layout has them."""

    pool: jax.Array  # [P, Hkv, page_size, width]
    scales: jax.Array | None  # float32 [P, 2 * Hkv, page_size]: what a quantized token's key and value are multiplied with


@dataclasses.dataclass(frozen=True)
class _PallasTpu:
    """What both have, in Pallas Mosaic TPU, for v5e, v5p, v6e and 7x."""

    name: ClassVar[str] = "pallas"
    platforms: ClassVar[tuple[str, ...]] = ("tpu",)
    default_page_size: ClassVar[int] = 128  # a page is one copy, of 512 KiB for 8 KV heads of 128 in bfloat16

    spec: AttentionSpec
    interpret: Any = False  # pltpu.InterpretParams in tests
    override: TpuConfig | None = None  # instead of what the cost model chooses
    checked: bool = False  # the chip checks each copy, to find a fault

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        return unsupported(spec)

    @functools.cached_property
    def config(self) -> TpuConfig:
        spec = self.spec
        if spec.batch_invariant:  # the order of sums follows the config, which then must not follow the page size
            assert spec.page_size is not None
            spec = dataclasses.replace(spec, page_size=max(spec.page_size, self.default_page_size))
        return self.override or choose_config(spec)

    @property
    def layout(self) -> RowLayout:
        return layout_of(self.spec)

    def kv_pages(self) -> TpuKV:
        spec = self.spec
        assert spec.page_size is not None
        pool = PageArray(self.layout.page_shape(spec.num_kv_heads, spec.page_size), jnp.dtype(spec.kv_dtype), 0)
        scales = PageArray((2 * spec.num_kv_heads, spec.page_size), jnp.dtype(jnp.float32), 0)
        return TpuKV(pool, scales if spec.kv_dtype in QUANTIZED_DTYPES else None)  # type: ignore[arg-type]

    def _plan(self, step: AttentionMetadata) -> AttentionMetadata:
        with jax.named_scope("plan_attention"):
            step = step.without_padding()
            work = plan_step(
                step.kv_lens,
                step.cu_q_lens,
                step.page_table,
                step.slot_pages,
                step.slot_offsets,
                decode_q_len=step.decode_q_len,
                page_size=self.kv_pages().pool.shape[1],
                config=self.config,
                all_alike=self.spec.batch_invariant,
            )
            return dataclasses.replace(step, work=work)

    def _options(self, layout: RowLayout, vmem_limit_bytes: int | None) -> dict[str, Any]:
        """What all calls of the kernel take."""
        return {
            "layout": layout,
            "vmem_limit_bytes": vmem_limit_bytes,
            "interpret": self.interpret,
            "checked": self.checked,
        }


@dataclasses.dataclass(frozen=True)
class PallasTpuAttention(_PallasTpu):
    """AttentionBackend."""

    def plan(self, step: AttentionMetadata) -> AttentionMetadata:
        assert self.spec.is_causal or step.decode_q_len in (None, 1), "whole texts have any number of queries"
        return self._plan(step)

    def rope_and_write(
        self,
        qkv: jax.Array,
        rotary: Rotary | None,
        kv_cache: TpuKV,
        metadata: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
    ) -> tuple[jax.Array, TpuKV]:
        q, k, v = split_and_rotate(qkv, rotary)
        row_scales = None
        with jax.named_scope("write_kv"):
            if kv_cache.scales is not None:
                (k, k_scale), (v, v_scale) = (quantize_rows(x, kv_cache.pool.dtype) for x in (k, v))
                row_scales = jnp.stack([k_scale, v_scale], axis=2).reshape(k.shape[0], -1)
            rows = self.layout.rows(k, v).astype(kv_cache.pool.dtype)
            options = {"interpret": self.interpret, "checked": self.checked}
            written = write_rows(*kv_cache, rows, row_scales, metadata.work.write, page_offset, **options)
        return q, TpuKV(*written)

    def ragged_paged_attention(
        self,
        q: jax.Array,
        kv_cache: TpuKV,
        metadata: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
        sliding_window: Any = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        work = metadata.work
        if not self.spec.is_causal:
            work = work.with_positions(both_ways.first_positions(metadata.kv_lens, sliding_window))
            sliding_window = both_ways.causal_window(sliding_window)
        with jax.named_scope("attention"):
            return paged_attention(
                q,
                *kv_cache,
                work,
                page_offset,
                scale=scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
                sinks=sinks,
                **self._options(self.layout, self.config.vmem_limit_bytes),
            )


@dataclasses.dataclass(frozen=True)
class PallasTpuLatentAttention(_PallasTpu, LatentBackend):
    """LatentBackend: the kernel over rows with one KV head, and over expanded keys and values with one for each head."""

    expanded_override: ExpandedConfig | None = None  # instead of what the cost model chooses

    @functools.cached_property
    def expanded(self) -> ExpandedConfig | None:
        """None if the kernel cannot have it."""
        spec = self.spec
        if spec.projected is None:
            return None
        assert spec.page_size is not None
        try:
            return self.expanded_override or expanded_config(
                spec.num_heads, self._expanded_layout, spec.page_size, spec.dtype, spec.chip.kind
            )
        except ValueError:
            return None

    @property
    def can_expand(self) -> bool:
        return self.expanded is not None

    @property
    def _expanded_layout(self) -> RowLayout:
        assert self.spec.projected is not None
        return RowLayout.of(self.spec.projected.key_dim, self.spec.projected.value_dim)

    def plan_absorbed(self, step: AttentionMetadata) -> AttentionMetadata:
        return self._plan(step)

    def write_rows(self, rows: jax.Array, kv_cache: TpuKV, plan: AttentionMetadata, page_offset: jax.typing.ArrayLike) -> TpuKV:
        latent, rotated = jnp.split(rows, [self.layout.value_dim], axis=1)
        options = {"interpret": self.interpret, "checked": self.checked}
        return TpuKV(*write_latents(*kv_cache, latent, rotated, plan.work.write, page_offset, **options))

    def read_rows(self, kv_cache: TpuKV, pages: jax.Array) -> jax.Array:
        def get(x: jax.Array) -> jax.Array:
            return x.at[pages, 0].get(mode="promise_in_bounds", wrap_negative_indices=False)

        rows = get(kv_cache.pool)[..., : self.spec.head_dim]
        if kv_cache.scales is not None:
            rows = rows.astype(jnp.float32) * get(kv_cache.scales)[..., None]
        return rows.astype(self.spec.dtype)

    def attend_absorbed(
        self,
        queries: jax.Array,
        kv_cache: TpuKV,
        plan: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
    ) -> jax.Array:
        options = self._options(self.layout, self.config.vmem_limit_bytes)
        return paged_attention(queries, *kv_cache, plan.work, page_offset, scale=scale, **options)

    def attend_partly_absorbed(
        self,
        queries: jax.Array,
        kv_cache: TpuKV,
        plan: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
    ) -> tuple[jax.Array, jax.Array]:
        options = self._options(self.layout, self.config.vmem_limit_bytes)
        return decode_attention(queries, *kv_cache, plan.work, page_offset, scale=scale, **options)

    def plan_expanded(self, part: ExpandedPart, cu_q_lens: jax.Array, num_tokens: int) -> PassPlan:
        assert self.expanded is not None
        q_lens = jnp.diff(cu_q_lens)
        return plan_pass(cu_q_lens[:-1], q_lens, part.kv_lens, num_tokens, self.expanded.extend, positions=part.first_positions)

    def attend_expanded(
        self, q: jax.Array, keys: jax.Array, values: jax.Array, part: ExpandedPart, plan: PassPlan, *, scale: float
    ) -> tuple[jax.Array, jax.Array]:
        config, layout = self.expanded, self._expanded_layout
        assert config is not None
        pages = layout.rows(keys, values)
        by_group = pages.reshape(len(pages), -1, config.heads_at_once, *pages.shape[2:]).swapaxes(0, 1)
        options = self._options(layout, config.vmem_limit_bytes)
        return extend_attention(q, by_group, plan, part_table(part, len(pages))[:, None], 0, scale=scale, **options)

    def without_table(self, plan: AttentionMetadata) -> AttentionMetadata:
        work = dataclasses.replace(plan.work, page_table=None, write=None)
        return dataclasses.replace(super().without_table(plan), work=work)

    def with_table(self, plan: AttentionMetadata, page_table: jax.Array) -> AttentionMetadata:
        work = dataclasses.replace(plan.work, page_table=page_table[:, None])
        return dataclasses.replace(super().with_table(plan, page_table), work=work)
