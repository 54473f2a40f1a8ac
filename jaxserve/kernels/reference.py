"""ReferenceAttention: paged attention in jax.numpy, for every platform; the specification of every kernel, and what CPUs run.

Pages and the writing of them are in reference_pages, the cutting of a step into tiles in query_tiles, the attention itself in
reference_loop. This module only puts them together.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jax.typing

from jaxserve.kernels import reference_pages
from jaxserve.kernels.metadata import AttentionMetadata, drop_padding, live_tokens
from jaxserve.kernels.query_tiles import QueryTiles, decode_tiles, extend_tiles
from jaxserve.kernels.reference_loop import PagedKV, ReferenceTuning, ScoreOptions, attend_tiles
from jaxserve.kernels.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class ReferenceAttention:
    """AttentionBackend in plain XLA operations, for every platform."""

    tuning: ReferenceTuning = dataclasses.field(default_factory=ReferenceTuning)
    name: str = "reference"
    default_page_size: int = 16
    kv_head_axis: int = reference_pages.KV_HEAD_AXIS

    def supports(self, spec: AttentionSpec) -> str | None:
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads are not a multiple of {spec.num_kv_heads} KV heads."
        return None

    def kv_page_shape(self, num_kv_heads: int, head_dim: int, page_size: int) -> tuple[int, ...]:
        return reference_pages.page_shape(num_kv_heads, head_dim, page_size)

    def kv_storage_dtype(self, dtype: jax.typing.DTypeLike, platform: str) -> jax.typing.DTypeLike:
        return reference_pages.storage_dtype(dtype, platform)

    def plan(
        self,
        *,
        kv_lens: jax.Array,
        cu_q_lens: jax.Array,
        page_table: jax.Array,
        slot_pages: jax.Array,
        slot_offsets: jax.Array,
        decode_only: bool,
    ) -> AttentionMetadata:
        num_tokens, num_rows = slot_pages.shape[0], kv_lens.shape[0]
        assert not decode_only or num_tokens == num_rows, f"decode only, but {num_tokens} tokens in {num_rows} rows"
        tiles: tuple[QueryTiles, ...]
        with jax.named_scope("plan_attention"):
            if decode_only:
                tiles = (decode_tiles(kv_lens),)
            else:
                tiles = extend_tiles(kv_lens, cu_q_lens, num_tokens, self.tuning.q_tile_tokens)
            is_live = live_tokens(kv_lens, cu_q_lens, num_tokens, decode_only)
            slot_pages = drop_padding(slot_pages, is_live)
        return AttentionMetadata(kv_lens, cu_q_lens, page_table, slot_pages, slot_offsets, tiles, decode_only)

    def write_kv(
        self, kv_cache: jax.Array, k: jax.Array, v: jax.Array, metadata: AttentionMetadata, page_offset: jax.typing.ArrayLike
    ) -> jax.Array:
        with jax.named_scope("write_kv"):
            return reference_pages.write(kv_cache, k, v, metadata, page_offset)

    def ragged_paged_attention(
        self,
        q: jax.Array,
        kv_cache: jax.Array,
        metadata: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
        sliding_window: Any = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        T, Hq, D = q.shape
        Hkv = kv_cache.shape[1]
        assert Hq % Hkv == 0, f"{Hq} query heads for {Hkv} KV heads"
        grouped = q.reshape(T, Hkv, Hq // Hkv, D)
        if sinks is not None:
            sinks = sinks.astype(jnp.float32).reshape(Hkv, Hq // Hkv)
        options = ScoreOptions(scale, sliding_window, soft_cap, sinks)
        page_size = reference_pages.page_size_of(kv_cache)
        chunk_pages = max(1, min(self.tuning.kv_chunk_tokens // page_size, metadata.page_table.shape[1]))
        kv = PagedKV(kv_cache, metadata.page_table, page_offset, chunk_pages)
        # float32 whatever q is: XLA on CPU would convert all of a bfloat16 buffer for each scatter into it.
        out = jnp.zeros(grouped.shape, jnp.float32)
        with jax.named_scope("attention"):
            for tiles in metadata.work:
                out = attend_tiles(out, grouped, kv, tiles, options, self.tuning.block_bytes)
        return out.astype(q.dtype).reshape(T, Hq, D)
