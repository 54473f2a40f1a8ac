"""PallasGpuLatentAttention: attention over paged latents on NVIDIA Hopper GPUs, absorbed in decode steps and for prompts.

All of it is the kernel of `mla`. Of steps that bring more than a token per row it takes groups of queries as rows, which share
a line of the page table (`query_groups`). By absorption a prompt costs (576 + 512) / (192 + 128) times the products of the
expanded form, but reads the cache as it is. Rows of latents are written by a scatter, in place.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jax.typing

from jaxserve.kernels.metadata import AttentionMetadata, drop_padding, live_tokens
from jaxserve.kernels.pages import PageArray
from jaxserve.kernels.pallas.gpu.attention import PallasGpuAttention, wrong_chip
from jaxserve.kernels.pallas.gpu.query_groups import QueryGroups
from jaxserve.kernels.spec import AttentionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentWork:
    plan: Any  # MlaPlan
    groups: QueryGroups | None  # None: each row has one query


@dataclasses.dataclass(frozen=True)
class PallasGpuLatentAttention:
    """LatentBackend in Pallas Mosaic GPU, for Hopper. The cache is one array of pages [1, page_size, head_dim]."""

    name: ClassVar[str] = PallasGpuAttention.name
    platforms: ClassVar[tuple[str, ...]] = PallasGpuAttention.platforms
    default_page_size: ClassVar[int] = 64  # a page is one tile

    spec: AttentionSpec
    interpret: Any = None  # plgpu.InterpretGPUParams in tests
    override: Any = None  # MlaConfig, in tests

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        return wrong_chip(spec) or _wrong_shape(spec)

    def kv_pages(self) -> PageArray:
        spec = self.spec
        assert spec.page_size is not None
        return PageArray((spec.num_kv_heads, spec.page_size, spec.head_dim), jnp.dtype(spec.kv_dtype), 0)

    def plan(
        self,
        *,
        kv_lens: jax.Array,
        cu_q_lens: jax.Array,
        page_table: jax.Array,
        slot_pages: jax.Array,
        slot_offsets: jax.Array,
        decode_q_len: int | None,
    ) -> AttentionMetadata:
        from jaxserve.kernels.pallas.gpu import mla

        num_tokens, num_heads = len(slot_pages), self.spec.num_heads
        with jax.named_scope("plan_attention"):
            is_live = live_tokens(kv_lens, cu_q_lens, num_tokens, decode_q_len)
            slot_pages = drop_padding(slot_pages, is_live)
            q_len, groups = 1, None
            if decode_q_len != 1:
                q_len = mla.group_q_len(num_heads)
                groups = QueryGroups.of(kv_lens, cu_q_lens, num_tokens, decode_q_len, q_len=q_len)
            plan = mla.plan_mla_decode(
                kv_lens if groups is None else groups.kv_lens,
                None if groups is None else groups.rows,
                q_len=q_len,
                num_heads=num_heads,
                config=self._config(),
            )
        work = LatentWork(plan, groups)
        return AttentionMetadata(kv_lens, cu_q_lens, page_table, slot_pages, slot_offsets, work, decode_q_len)

    def write(
        self, rows: jax.Array, kv_cache: jax.Array, metadata: AttentionMetadata, page_offset: jax.typing.ArrayLike
    ) -> jax.Array:
        from jaxserve.kernels.pallas.gpu import write

        with jax.named_scope("write_kv"):
            return write.scatter_rows(kv_cache, rows[:, None], metadata.slot_pages, metadata.slot_offsets, page_offset)

    def attend(
        self,
        queries: jax.Array,
        kv_cache: jax.Array,
        metadata: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
    ) -> jax.Array:
        from jaxserve.kernels.pallas.gpu import mla

        work: LatentWork = metadata.work
        with jax.named_scope("attention"):
            out = mla.mla_decode(
                queries[:, None] if work.groups is None else work.groups.cut(queries),
                kv_cache,
                metadata.page_table,
                work.plan,
                jnp.asarray(page_offset, jnp.int32),
                scale=scale,
                config=self._config(),
                interpret=self.interpret,
            )
            return out[:, 0] if work.groups is None else work.groups.join(out)

    def _config(self) -> Any:
        from jaxserve.kernels.pallas.gpu import mla

        return self.override or mla.MlaConfig(num_blocks=self.spec.chip.num_cores)


def _wrong_shape(spec: AttentionSpec) -> str | None:
    from jaxserve.kernels.pallas.gpu import mla

    assert spec.page_size is not None and spec.latent_dim is not None
    if spec.windows != (None,) or spec.uses_soft_cap or spec.uses_sinks:
        return "of latents it takes no window, soft cap or sinks."
    if spec.kv_dtype != spec.dtype:
        return f"it keeps latents in the model's type, {spec.dtype}, not {spec.kv_dtype}."
    reason = mla.unsupported(
        num_heads=spec.num_heads,
        q_len=1,
        latent_dim=spec.latent_dim,
        row_dim=spec.head_dim,
        page_size=spec.page_size,
        dtype=spec.dtype,
    )
    return None if reason is None else f"{reason}."
