"""ReferenceLatentAttention: attention over paged latents in jax.numpy, for every platform; the specification of the kernels.

It is `ReferenceAttention` with one KV head, whose pages hold one row per token: the key, the first part of which is the value.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.typing

from jaxserve.kernels import reference_pages
from jaxserve.kernels.metadata import AttentionMetadata
from jaxserve.kernels.reference import ReferenceAttention
from jaxserve.kernels.reference_pages import ReferenceKV
from jaxserve.kernels.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class ReferenceLatentAttention:
    """LatentBackend in plain XLA operations, for every platform."""

    name: ClassVar[str] = "reference"
    platforms: ClassVar[tuple[str, ...]] = ReferenceAttention.platforms
    default_page_size: ClassVar[int] = ReferenceAttention.default_page_size

    spec: AttentionSpec

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        return None

    def kv_pages(self) -> ReferenceKV:
        spec = self.spec
        assert spec.page_size is not None
        return reference_pages.pages(1, spec.head_dim, spec.page_size, spec.kv_dtype, spec.chip.platform, has_values=False)

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
        return self._by_head.plan(
            kv_lens=kv_lens,
            cu_q_lens=cu_q_lens,
            page_table=page_table,
            slot_pages=slot_pages,
            slot_offsets=slot_offsets,
            decode_q_len=decode_q_len,
        )

    def write(
        self, rows: jax.Array, kv_cache: ReferenceKV, metadata: AttentionMetadata, page_offset: jax.typing.ArrayLike
    ) -> ReferenceKV:
        with jax.named_scope("write_kv"):
            return reference_pages.write(kv_cache, rows[:, None, None], metadata, page_offset)

    def attend(
        self,
        queries: jax.Array,
        kv_cache: ReferenceKV,
        metadata: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
    ) -> jax.Array:
        out = self._by_head.ragged_paged_attention(queries, kv_cache, metadata, page_offset, scale=scale)
        return out[..., : self.spec.latent_dim]

    @property
    def _by_head(self) -> ReferenceAttention:
        return ReferenceAttention(self.spec)
