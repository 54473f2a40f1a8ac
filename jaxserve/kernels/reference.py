"""ReferenceAttention: paged attention in jax.numpy, for every platform; the specification of every kernel.

Pages and the writing of them are in reference_pages, the cutting of a step into tiles in query_tiles, the attention itself in
reference_loop. This module only puts them together.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jax.typing

from jaxserve.kernels import reference_pages
from jaxserve.kernels.metadata import AttentionMetadata, decode_q_lens
from jaxserve.kernels.query_tiles import QueryTiles, all_alike_tiles, decode_tiles, extend_tiles
from jaxserve.kernels.reference_loop import Attended, PagedKV, ReferenceTuning, ScoreOptions, attend_tiles
from jaxserve.kernels.reference_pages import ReferenceKV
from jaxserve.kernels.rotary import Rotary, split_and_rotate
from jaxserve.kernels.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class ReferenceAttention:
    """AttentionBackend in plain XLA operations, for every platform."""

    name: ClassVar[str] = "reference"
    platforms: ClassVar[tuple[str, ...]] = ("cpu", "gpu", "tpu")
    default_page_size: ClassVar[int] = 16

    spec: AttentionSpec
    tuning: ReferenceTuning = dataclasses.field(default_factory=ReferenceTuning)

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads are not a multiple of {spec.num_kv_heads} KV heads."
        return None

    def kv_pages(self) -> ReferenceKV:
        spec = self.spec
        assert spec.page_size is not None
        return reference_pages.pages(spec.num_kv_heads, spec.head_dim, spec.page_size, spec.kv_dtype, spec.chip.platform)

    def plan(self, step: AttentionMetadata) -> AttentionMetadata:
        kv_lens, cu_q_lens, decode_q_len = step.kv_lens, step.cu_q_lens, step.decode_q_len
        tiles: tuple[QueryTiles, ...]
        with jax.named_scope("plan_attention"):
            if decode_q_len is None:
                tile_tokens, is_causal = self.tuning.q_tile_tokens, self.spec.is_causal
                cut = extend_tiles if not self.spec.batch_invariant else all_alike_tiles
                tiles = cut(kv_lens, cu_q_lens, step.num_tokens, tile_tokens, is_causal=is_causal)
            else:
                tiles = (decode_tiles(kv_lens, decode_q_lens(kv_lens, cu_q_lens, decode_q_len), decode_q_len),)
            return dataclasses.replace(step.without_padding(), work=tiles)

    def rope_and_write(
        self,
        qkv: jax.Array,
        rotary: Rotary | None,
        kv_cache: ReferenceKV,
        metadata: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
    ) -> tuple[jax.Array, ReferenceKV]:
        q, k, v = split_and_rotate(qkv, rotary)
        with jax.named_scope("write_kv"):
            return q, reference_pages.write(kv_cache, jnp.stack([k, v], axis=2), metadata, page_offset)

    def ragged_paged_attention(
        self,
        q: jax.Array,
        kv_cache: ReferenceKV,
        metadata: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
        sliding_window: Any = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        options = ScoreOptions(scale, sliding_window, soft_cap, _by_kv_head(sinks, kv_cache), self.spec.is_causal)
        return self.attend(q, kv_cache, metadata, page_offset, options, with_log_sums=False)[0]

    def attend(
        self,
        q: jax.Array,
        kv_cache: ReferenceKV,
        metadata: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        options: ScoreOptions,
        *,
        with_log_sums: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        """As `ragged_paged_attention`; and float32 [T, Hq] logarithms of the sums of exp(score), very low without a key."""
        T, Hq, D = q.shape
        Hkv = kv_cache.num_kv_heads
        assert Hq % Hkv == 0, f"{Hq} query heads for {Hkv} KV heads"
        grouped = q.reshape(T, Hkv, Hq // Hkv, D)
        chunk_pages = max(1, self.tuning.kv_chunk_tokens // kv_cache.page_size)
        if not self.spec.batch_invariant:  # else chunks are of as many tokens whatever the page size
            chunk_pages = min(chunk_pages, metadata.page_table.shape[1])
        kv = PagedKV(kv_cache, metadata.page_table, page_offset, chunk_pages)
        attended = Attended.nothing(grouped, with_log_sums=with_log_sums)
        with jax.named_scope("attention"):
            for tiles in metadata.work:
                attended = attend_tiles(attended, grouped, kv, tiles, options, self.tuning.block_bytes)
        log_sums = attended.log_sums
        return attended.out.astype(q.dtype).reshape(T, Hq, D), None if log_sums is None else log_sums.reshape(T, Hq)


def _by_kv_head(sinks: jax.Array | None, kv_cache: ReferenceKV) -> jax.Array | None:
    return None if sinks is None else sinks.astype(jnp.float32).reshape(kv_cache.num_kv_heads, -1)
