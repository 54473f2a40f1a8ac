"""ReferenceLatentAttention: attention over paged latents in jax.numpy, for every platform; the specification of the kernels.

Absorbed, it is `ReferenceAttention` with one KV head, whose pages hold one row per token: the key, the first part of which is
the value. Expanded, it is the same loop over pages of as many heads as there are.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import jax.typing

from jaxserve.kernels import reference_pages
from jaxserve.kernels.latent import LatentBackend, part_table
from jaxserve.kernels.latent_parts import ExpandedPart
from jaxserve.kernels.metadata import AttentionMetadata
from jaxserve.kernels.query_tiles import QueryTiles, cut_rows
from jaxserve.kernels.reference import ReferenceAttention
from jaxserve.kernels.reference_loop import Attended, PagedKV, ReferenceTuning, ScoreOptions, attend_tiles
from jaxserve.kernels.reference_pages import ReferenceKV
from jaxserve.kernels.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class ReferenceLatentAttention(LatentBackend):
    """LatentBackend in plain XLA operations, for every platform."""

    name: ClassVar[str] = "reference"
    platforms: ClassVar[tuple[str, ...]] = ReferenceAttention.platforms
    default_page_size: ClassVar[int] = ReferenceAttention.default_page_size

    tuning: ReferenceTuning = dataclasses.field(default_factory=ReferenceTuning)
    # Each head gathers keys of its own, for as many queries as can be: of `python -m benchmarks.latent_prefill` on 2 CPU cores
    # the fastest.
    expanded_tuning: ReferenceTuning = dataclasses.field(
        default=ReferenceTuning(kv_chunk_tokens=256, q_tile_tokens=256, block_bytes=8 << 20)
    )

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        return None if spec.is_causal else "attention over latents is causal."

    @property
    def can_expand(self) -> bool:
        return True

    def kv_pages(self) -> ReferenceKV:
        spec = self.spec
        assert spec.page_size is not None
        return reference_pages.pages(1, spec.head_dim, spec.page_size, spec.kv_dtype, spec.chip.platform, has_values=False)

    def plan_absorbed(self, step: AttentionMetadata) -> AttentionMetadata:
        return self._by_head.plan(step)

    def write_rows(
        self, rows: jax.Array, kv_cache: ReferenceKV, plan: AttentionMetadata, page_offset: jax.typing.ArrayLike
    ) -> ReferenceKV:
        return reference_pages.write(kv_cache, rows[:, None, None], plan, page_offset)

    def read_rows(self, kv_cache: ReferenceKV, pages: jax.Array) -> jax.Array:
        rows = reference_pages.read(kv_cache, pages[:, None], reference_pages.KEYS)
        return rows[:, 0].astype(self.spec.dtype)

    def attend_absorbed(
        self,
        queries: jax.Array,
        kv_cache: ReferenceKV,
        plan: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
    ) -> jax.Array:
        out, _ = self._by_head.attend(queries, kv_cache, plan, page_offset, _plain(scale), with_log_sums=False)
        return out[..., : self.spec.latent_dim]

    def attend_partly_absorbed(
        self,
        queries: jax.Array,
        kv_cache: ReferenceKV,
        plan: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
    ) -> tuple[jax.Array, jax.Array]:
        out, log_sums = self._by_head.attend(queries, kv_cache, plan, page_offset, _plain(scale), with_log_sums=True)
        assert log_sums is not None
        return out[..., : self.spec.latent_dim], log_sums

    def plan_expanded(self, part: ExpandedPart, cu_q_lens: jax.Array, num_tokens: int) -> QueryTiles:
        q_lens = jnp.where(part.kv_lens > 0, jnp.diff(cu_q_lens), 0)
        return cut_rows(part.kv_lens, cu_q_lens, q_lens, part.first_positions, num_tokens, self.expanded_tuning.q_tile_tokens)

    def attend_expanded(
        self, q: jax.Array, keys: jax.Array, values: jax.Array, part: ExpandedPart, plan: QueryTiles, *, scale: float
    ) -> tuple[jax.Array, jax.Array]:
        value_dim, page_size = values.shape[-1], values.shape[2]
        q, keys, values = _equally_long(q, keys, values)
        pool = ReferenceKV(jnp.stack([keys, values], axis=2), None)
        chunk_pages = min(max(self.expanded_tuning.kv_chunk_tokens // page_size, 1), len(keys))
        kv = PagedKV(pool, part_table(part, len(keys)), 0, chunk_pages)
        by_head = q[:, :, None]
        out = attend_tiles(
            Attended.nothing(by_head, with_log_sums=True),
            by_head,
            kv,
            plan,
            _plain(scale),
            self.expanded_tuning.block_bytes,
        )
        assert out.log_sums is not None
        return out.out[:, :, 0, :value_dim], out.log_sums[:, :, 0]

    @property
    def _by_head(self) -> ReferenceAttention:
        return ReferenceAttention(self.spec, self.tuning)


def _plain(scale: float) -> ScoreOptions:
    return ScoreOptions(scale, sliding_window=None, soft_cap=None, sinks=None)


def _equally_long(*arrays: jax.Array) -> list[jax.Array]:
    """With zeros behind the shorter ones, in the last axis: pages hold keys and values of one length."""
    longest = max(x.shape[-1] for x in arrays)
    return [jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, longest - x.shape[-1])]) for x in arrays]
