"""Latent attention (DeepSeek): keys and values of all heads are projections of one small row per token, which is what is kept.

There are two ways to it. Absorbed, queries are projected into the space of rows, all heads read the rows as they are, and what
they read is projected to values: little to read, many products. Expanded, the rows that a step's queries see are projected to
each head's key and value, over which attention is the plain one: once they are there, 3.4 times fewer products for each query
and key of DeepSeek-V3. So steps that decode are absorbed; of others, rows of few queries are, and those of many are expanded
(`latent_parts`). The expanded side goes over its rows' pages in parts, whose results are merged by the logarithms of their
sums, so that long contexts need no more memory than a part. Backends have what touches pages, and both kinds of attention.

Where devices share latents by tokens (`context`), absorbed queries go to the rows, and rows to be expanded come to the queries.

T tokens, R rows, H heads of one shard, L latent_dim.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import jax.typing

from jaxserve.kernels.context import rows_of_tokens
from jaxserve.kernels.filled import filled
from jaxserve.kernels.latent_parts import AbsorbedPart, Division, ExpandedPart, Rows, Sizes, stacked
from jaxserve.kernels.metadata import NO_PAGE, AttentionMetadata
from jaxserve.kernels.spec import AttentionSpec

# Of queries that see no key, in place of -inf: differences stay numbers.
LOWEST = -1e30


class Projections(NamedTuple):
    """From latents to each head's key, but for its rotated end, and value."""

    keys: jax.Array  # [H, nope_dim, L]
    values: jax.Array  # [H, value_dim, L]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentWork:
    whole: AttentionMetadata  # the backend's own of all of the step
    by_token: AttentionMetadata | None  # what is absorbed where devices share latents and nothing is divided
    divided: DividedWork | None  # None: all is absorbed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DividedWork:
    """Parts have an axis in front, of which the first `num_absorbed` and `num_expanded` are there."""

    num_absorbed: jax.Array
    num_expanded: jax.Array
    absorbed: tuple[AbsorbedPart, Any]  # with the backend's plans
    expanded: tuple[ExpandedPart, Any]


class Merged(NamedTuple):
    """Attention over the keys of some parts."""

    out: jax.Array  # float32 [T, H, value_dim]
    log_sums: jax.Array  # float32 [T, H] of exp(score); LOWEST or less where no key was seen

    def with_part(self, out: jax.Array, log_sums: jax.Array) -> Merged:
        total = jnp.logaddexp(self.log_sums, log_sums)
        old, new = (jnp.exp(x - total)[..., None] for x in (self.log_sums, log_sums))
        return Merged(self.out * old + out.astype(jnp.float32) * new, total)


@dataclasses.dataclass(frozen=True)
class LatentBackend(abc.ABC):
    """One implementation of latent attention (a `PagedBackend`). Here is what they have in common; the abstract ones differ."""

    name: ClassVar[str]
    platforms: ClassVar[tuple[str, ...]]
    default_page_size: ClassVar[int]

    spec: AttentionSpec
    division: Division = dataclasses.field(default_factory=Division, kw_only=True)

    def plan(self, step: AttentionMetadata) -> AttentionMetadata:
        """`step` with the backend's work. Once per step, for all its layers."""
        context = self.spec.context
        whole = self.plan_absorbed(step if context is None else context.own_slots(step, self._part_tokens))
        by_token, divided = None, None
        # Batch-invariant attention does not divide rows by their lengths in a step.
        if step.decode_q_len is None and self.can_expand and not self.spec.batch_invariant:
            sizes = self.division.sizes(self.spec, step.num_tokens, *step.page_table.shape)
            divided = None if sizes is None else self._divide(whole, sizes)
        if context is not None and divided is None:
            by_token = self.plan_absorbed(context.by_token(step, self._part_tokens))
        return dataclasses.replace(whole, work=LatentWork(whole, by_token, divided))

    def write(self, rows: jax.Array, kv_cache: Any, metadata: AttentionMetadata, page_offset: jax.typing.ArrayLike) -> Any:
        """Writes rows [T, head_dim] into the pages page_offset + slot_pages. Returns the cache, updated in place if it is
        donated or carried."""
        with jax.named_scope("write_kv"):
            return self.write_rows(rows, kv_cache, metadata.work.whole, page_offset)

    def attend(
        self,
        q: jax.Array,
        projections: Projections,
        kv_cache: Any,
        metadata: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
    ) -> jax.Array:
        """Causal attention of q [T, H, nope_dim + rope_dim], rotated, over each row's pages, as `ragged_paged_attention` has it
        -> values [T, H, value_dim]."""
        work: LatentWork = metadata.work
        if work.divided is None:
            return self._absorbed(q, projections, kv_cache, work.by_token or work.whole, page_offset, scale)
        parts = work.divided
        out = self._attend_expanded_parts(parts, q, projections, kv_cache, page_offset, scale)

        def absorb_part(index: jax.Array, out: jax.Array) -> jax.Array:
            part, plan = jax.tree.map(lambda x: x[index], parts.absorbed)
            plan = self.with_table(plan, self._table_of(part, work.whole.page_table))
            queries = q.at[part.tokens].get(mode="clip")
            values = self._absorbed(queries, projections, kv_cache, plan, page_offset, scale)
            return out.at[part.tokens].set(values, mode="drop", wrap_negative_indices=False)

        return jax.lax.fori_loop(0, parts.num_absorbed, absorb_part, out)

    def _divide(self, whole: AttentionMetadata, sizes: Sizes) -> DividedWork:
        rows = Rows.of(whole.kv_lens, whole.cu_q_lens, whole.num_tokens, self.spec.page_tokens, sizes)

        def absorbed(index: jax.Array) -> tuple[AbsorbedPart, Any]:
            part = rows.absorbed(index, sizes.absorbed_tokens)
            step = _step_of(part, whole.page_table)
            if self.spec.context is not None:
                step = self.spec.context.by_token(step, self._part_tokens)
            return part, self.without_table(self.plan_absorbed(step))

        def expanded(index: jax.Array) -> tuple[ExpandedPart, Any]:
            part = rows.expanded(index, sizes.pages, whole.page_table)
            return part, self.plan_expanded(part, whole.cu_q_lens, whole.num_tokens)

        with jax.named_scope("divide_attention"):
            num_absorbed, num_expanded = rows.num_absorbed(sizes.absorbed_tokens), rows.num_expanded(sizes.pages)
            return DividedWork(
                num_absorbed,
                num_expanded,
                stacked(absorbed, num_absorbed, -(-whole.num_tokens // sizes.absorbed_tokens)),
                stacked(expanded, num_expanded, sizes.expanded_parts),
            )

    def _absorbed(
        self,
        q: jax.Array,
        projections: Projections,
        kv_cache: Any,
        plan: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        scale: float,
    ) -> jax.Array:
        assert self.spec.projected is not None
        nope, rotated = jnp.split(q, [self.spec.projected.nope_dim], axis=-1)
        with jax.named_scope("absorb"):
            queries = jnp.concatenate([_product("thn,hnl->thl", nope, projections.keys), rotated], axis=-1)
        with jax.named_scope("attention"):
            context = self.spec.context
            if context is None:
                out = self.attend_absorbed(queries, kv_cache, plan, page_offset, scale=scale)
            else:
                queries = context.all_heads(queries)
                out = context.merged(*self.attend_partly_absorbed(queries, kv_cache, plan, page_offset, scale=scale))
        with jax.named_scope("values"):
            return _product("thl,hvl->thv", out, projections.values)

    def _table_of(self, part: AbsorbedPart, page_table: jax.Array) -> jax.Array:
        """The page table that a part's plan is for."""
        return page_table if self.spec.context is None else page_table[rows_of_tokens(part.cu_q_lens, len(part.tokens))]

    @property
    def _part_tokens(self) -> int:
        """Of a page, on this device."""
        assert self.spec.page_size is not None
        return self.spec.page_size

    def _attend_expanded_parts(
        self,
        parts: DividedWork,
        q: jax.Array,
        projections: Projections,
        kv_cache: Any,
        page_offset: jax.typing.ArrayLike,
        scale: float,
    ) -> jax.Array:
        num_tokens, num_heads, _ = q.shape

        def add_part(index: jax.Array, merged: Merged) -> Merged:
            part, plan = jax.tree.map(lambda x: x[index], parts.expanded)
            with jax.named_scope("expand"):
                rows = self.read_rows(kv_cache, part.pages + page_offset)
                if self.spec.context is not None:
                    rows, part = self.spec.context.whole_pages(rows), part.in_parts(self.spec.context_size)
                keys, values = self._expand(rows, projections)
            with jax.named_scope("attention"):
                return merged.with_part(*self.attend_expanded(q, keys, values, part, plan, scale=scale))

        nothing = filled((num_tokens, num_heads, projections.values.shape[1]), 0, after=q)
        start = Merged(nothing, filled((num_tokens, num_heads), LOWEST, after=q))
        return jax.lax.fori_loop(0, parts.num_expanded, add_part, start).out.astype(q.dtype)

    def _expand(self, rows: jax.Array, projections: Projections) -> tuple[jax.Array, jax.Array]:
        """Rows [n, page_size, head_dim] of some pages -> their keys [n, H, page_size, key_dim] and values [.., value_dim]."""
        latents, rotated = jnp.split(rows, [projections.keys.shape[2]], axis=-1)
        keys = _product("pcl,hnl->phcn", latents, projections.keys)
        rotated = jnp.broadcast_to(rotated[:, None], (*keys.shape[:3], rotated.shape[-1]))
        return jnp.concatenate([keys, rotated], axis=-1), _product("pcl,hvl->phcv", latents, projections.values)

    @classmethod
    @abc.abstractmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """None, or the reason why not, as a sentence."""

    @property
    @abc.abstractmethod
    def can_expand(self) -> bool:
        """Whether `attend_expanded` can be had; a backend that has it not absorbs all."""

    @abc.abstractmethod
    def kv_pages(self) -> Any:
        """The cache as a pytree of PageArray."""

    @abc.abstractmethod
    def plan_absorbed(self, step: AttentionMetadata) -> AttentionMetadata:
        """`step` with the backend's work: what the methods below take as `plan`."""

    @abc.abstractmethod
    def write_rows(self, rows: jax.Array, kv_cache: Any, plan: AttentionMetadata, page_offset: jax.typing.ArrayLike) -> Any:
        """As `write`."""

    @abc.abstractmethod
    def read_rows(self, kv_cache: Any, pages: jax.Array) -> jax.Array:
        """Of pages int32 [n], the layer's offset added: [n, page_size, head_dim] of the model's type."""

    @abc.abstractmethod
    def attend_absorbed(
        self,
        queries: jax.Array,
        kv_cache: Any,
        plan: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
    ) -> jax.Array:
        """Causal attention of queries [T, H, head_dim] in the space of rows -> [T, H, L]; zeros for padding. H is
        spec.absorbed_heads."""

    @abc.abstractmethod
    def attend_partly_absorbed(
        self,
        queries: jax.Array,
        kv_cache: Any,
        plan: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
    ) -> tuple[jax.Array, jax.Array]:
        """The same of a step with a query per row, whose keys are not all here; and log_sums float32 [T, H] as Merged has
        them."""

    @abc.abstractmethod
    def plan_expanded(self, part: ExpandedPart, cu_q_lens: jax.Array, num_tokens: int) -> Any:
        """What `attend_expanded` wants to know of a part: a pytree."""

    @abc.abstractmethod
    def attend_expanded(
        self, q: jax.Array, keys: jax.Array, values: jax.Array, part: ExpandedPart, plan: Any, *, scale: float
    ) -> tuple[jax.Array, jax.Array]:
        """Attention of q [T, H, key_dim] over a part's keys [n, H, page_size, key_dim] and values: (out [T, H, value_dim],
        log_sums float32 [T, H]). Row r's first query stands at part.first_positions[r], which may be negative, or behind all
        keys. Where a query sees no key log_sums are LOWEST or less, and out is a number."""

    def without_table(self, plan: AttentionMetadata) -> AttentionMetadata:
        """A plan that is kept for many parts, all of one page table."""
        return dataclasses.replace(plan, page_table=None)  # type: ignore[arg-type]

    def with_table(self, plan: AttentionMetadata, page_table: jax.Array) -> AttentionMetadata:
        return dataclasses.replace(plan, page_table=page_table)


def _step_of(part: AbsorbedPart, page_table: jax.Array) -> AttentionMetadata:
    nowhere = jnp.full_like(part.tokens, NO_PAGE)
    return AttentionMetadata(part.kv_lens, part.cu_q_lens, page_table, nowhere, jnp.zeros_like(nowhere), decode_q_len=None)


def part_table(part: ExpandedPart, most_pages: int) -> jax.Array:
    """int32 [R, most_pages] page table of a part's own pages."""
    table = part.first_pages[:, None] + jnp.arange(most_pages, dtype=jnp.int32)
    return jnp.minimum(table, len(part.pages) - 1)


def _product(subscripts: str, x: jax.Array, matrices: jax.Array) -> jax.Array:
    """A float32 model is computed in full float32 on any device."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, x, matrices, precision=precision, preferred_element_type=x.dtype)
