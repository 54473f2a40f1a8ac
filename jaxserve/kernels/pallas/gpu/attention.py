"""PallasGpuAttention: paged attention on NVIDIA Hopper GPUs. Puts together the kernels that decode, extend and
write hold.

A row with one query goes through the decode kernel, which splits its keys over the whole chip, as do all rows of a step that
says how few queries each has; others go through the extend kernel. Both lists of work are made once per step and shared by
all layers. Where attention is not causal, a row with one query has one key, so only the extend kernel's queries have to be
moved (both_ways). Heads of a size that the kernels do not have are normed and rotated by XLA and filled up with zeros to the
next one, in pages, too. The kernels are imported where they are used: a server on a CPU should not pay a second of start-up for
a compiler it never calls.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import jax.typing

from jaxserve.kernels import tuning
from jaxserve.kernels.metadata import AttentionMetadata, decode_q_lens
from jaxserve.kernels.pages import PageArray
from jaxserve.kernels.pallas import both_ways
from jaxserve.kernels.pallas.gpu.query_parts import QueryParts
from jaxserve.kernels.rotary import Rotary, split_and_rotate
from jaxserve.kernels.spec import QUANTIZED_DTYPES, AttentionSpec

OLDEST_JAX = (0, 11, 2)


class GpuKV(NamedTuple):
    """The KV cache. A page is [Hkv, page_size, 2 D]: a token's key, then its value, so that one copy writes both."""

    pool: jax.Array
    scales: jax.Array | None  # float32 pages [Hkv, 2 (K, V), page_size]: what a quantized token's values are multiplied with


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GpuWork:
    """What the kernels do in a step; the plans stand in the order of the spec's windows."""

    decode: tuple[Any, ...]  # DecodePlan; empty if all rows are the extend kernel's
    extend: tuple[Any, ...]  # ExtendPlan; empty if all rows decode
    decode_tokens: jax.Array | None  # int32 [R] the token of a row with one query; T, which no token has, for others. None: all
    decode_table: jax.Array  # [items, max_pages] the page table of what the decode kernel takes as rows


@dataclasses.dataclass(frozen=True)
class PallasGpuAttention:
    """AttentionBackend in Pallas Mosaic GPU, for Hopper."""

    name: ClassVar[str] = "pallas"
    platforms: ClassVar[tuple[str, ...]] = ("gpu",)
    default_page_size: ClassVar[int] = 64  # one page is one tile of keys: one copy brings it

    spec: AttentionSpec
    interpret: Any = None  # plgpu.InterpretGPUParams in tests

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        return wrong_chip(spec) or _wrong_shape(spec)

    def kv_pages(self) -> GpuKV:
        spec = self.spec
        assert spec.page_size is not None
        pool = PageArray((spec.num_kv_heads, spec.page_size, 2 * kernel_dim(spec)), jnp.dtype(spec.kv_dtype), 0)
        scales = PageArray((spec.num_kv_heads, 2, spec.page_size), jnp.dtype(jnp.float32), 0)
        return GpuKV(pool, scales if spec.kv_dtype in QUANTIZED_DTYPES else None)  # type: ignore[arg-type]

    def plan(self, step: AttentionMetadata) -> AttentionMetadata:
        kv_lens, cu_q_lens, page_table, decode_q_len = step.kv_lens, step.cu_q_lens, step.page_table, step.decode_q_len
        assert self.spec.is_causal or decode_q_len in (None, 1), "whole texts have any number of queries"
        with jax.named_scope("plan_attention"):
            if self.spec.batch_invariant:
                assert decode_q_len is None, "steps are all of one kind"
                work = GpuWork((), self._plan_extend(kv_lens, cu_q_lens, step.num_tokens), None, page_table)
            elif decode_q_len is None:
                is_decode = cu_q_lens[1:] - cu_q_lens[:-1] == 1
                work = GpuWork(
                    decode=self._plan_decode(jnp.where(is_decode, kv_lens, 0), None, q_len=1),
                    extend=self._plan_extend(kv_lens, cu_q_lens, step.num_tokens),
                    decode_tokens=jnp.where(is_decode, cu_q_lens[:-1], step.num_tokens),
                    decode_table=page_table,
                )
            else:
                parts = self._parts(decode_q_len)
                part_kv_lens, part_q_lens = parts.lens(kv_lens, decode_q_lens(kv_lens, cu_q_lens, decode_q_len))
                work = GpuWork(
                    decode=self._plan_decode(part_kv_lens, part_q_lens, q_len=parts.q_len),
                    extend=(),
                    decode_tokens=None,
                    decode_table=parts.of_rows(page_table),
                )
            return dataclasses.replace(step.without_padding(), work=work)

    def rope_and_write(
        self,
        qkv: jax.Array,
        rotary: Rotary | None,
        kv_cache: GpuKV,
        metadata: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
    ) -> tuple[jax.Array, GpuKV]:
        from jaxserve.kernels.pallas.gpu import write

        with jax.named_scope("rope_and_write"):
            if self._fills_up:
                qkv, rotary = _filled_up(qkv, rotary, kernel_dim(self.spec)), None
            q, pool, scales = write.rope_and_write(
                qkv,
                rotary,
                *kv_cache,
                metadata.slot_pages,
                metadata.slot_offsets,
                page_offset,
                interpret=self.interpret,
            )
        return q, GpuKV(pool, scales)

    def ragged_paged_attention(
        self,
        q: jax.Array,
        kv_cache: GpuKV,
        metadata: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        from jaxserve.kernels.pallas.gpu import decode

        window = self.spec.windows.index(sliding_window)
        work: GpuWork = metadata.work
        options: dict[str, Any] = {
            "head_dim_v": kernel_dim(self.spec),
            "scale": scale,
            "sliding_window": sliding_window,
            "soft_cap": soft_cap,
            "sinks": sinks,
            "interpret": self.interpret,
        }
        if self.spec.batch_invariant:
            return self._own_columns(self._extended(q, kv_cache, metadata, page_offset, window, options))
        with jax.named_scope("decode_attention"):
            parts = self._parts(metadata.decode_q_len or 1)
            queries = q if work.decode_tokens is None else q.at[work.decode_tokens].get(mode="clip")
            decoded = decode.paged_decode(
                parts.cut(queries),
                *kv_cache,
                work.decode_table,
                work.decode[window],
                page_offset,
                config=self._decode_config(),
                **options,
            )
            decoded = parts.join(decoded)
        if work.decode_tokens is None:
            return self._own_columns(decoded)
        if not self.spec.is_causal:
            options["sliding_window"] = both_ways.causal_window(sliding_window)
        out = self._extended(q, kv_cache, metadata, page_offset, window, options)
        with jax.named_scope("extend_attention"):
            return self._own_columns(out.at[work.decode_tokens].set(decoded, mode="drop", unique_indices=False))

    def _extended(
        self,
        q: jax.Array,
        kv_cache: GpuKV,
        metadata: AttentionMetadata,
        page_offset: jax.typing.ArrayLike,
        window: int,
        options: dict[str, Any],
    ) -> jax.Array:
        from jaxserve.kernels.pallas.gpu import extend

        plan, config = metadata.work.extend[window], self._extend_config()
        with jax.named_scope("extend_attention"):
            return extend.paged_extend(q, *kv_cache, metadata.page_table, plan, page_offset, config=config, **options)

    @property
    def _fills_up(self) -> bool:
        return kernel_dim(self.spec) != self.spec.head_dim

    def _own_columns(self, out: jax.Array) -> jax.Array:
        return out[..., : self.spec.head_dim] if self._fills_up else out

    def _parts(self, row_q_len: int) -> QueryParts:
        from jaxserve.kernels.pallas.gpu import decode

        return QueryParts.of(row_q_len, decode.max_q_len(self.spec.group))

    def _plan_decode(self, kv_lens: jax.Array, q_lens: jax.Array | None, *, q_len: int) -> tuple[Any, ...]:
        from jaxserve.kernels.pallas.gpu import decode

        return tuple(
            decode.plan_decode(
                kv_lens,
                q_lens,
                q_len=q_len,
                num_kv_heads=self.spec.num_kv_heads,
                sliding_window=window,
                config=self._decode_config(),
            )
            for window in self.spec.windows
        )

    def _plan_extend(self, kv_lens: jax.Array, cu_q_lens: jax.Array, num_tokens: int) -> tuple[Any, ...]:
        from jaxserve.kernels.pallas.gpu import extend

        shortest = 1 if self.spec.batch_invariant else 2
        options: dict[str, Any] = {"group": self.spec.group, "min_q_len": shortest, "config": self._extend_config()}
        plan = functools.partial(extend.plan_extend, kv_lens, cu_q_lens, num_tokens, **options)
        windows = self.spec.windows
        if self.spec.is_causal:
            return (plan(),) * len(windows)
        return tuple(plan(first_positions=both_ways.first_positions(kv_lens, window)) for window in windows)

    def _decode_config(self) -> Any:
        chip = self.spec.chip
        return dataclasses.replace(tuning.decode_config(chip.kind, self._shape()), num_sms=chip.num_cores)

    def _extend_config(self) -> Any:
        chip = self.spec.chip
        shape = self._shape()
        if self.spec.batch_invariant:  # the order of sums follows the config, which then must not follow the page size
            shape = dataclasses.replace(shape, page_size=self.default_page_size)
        return dataclasses.replace(tuning.extend_config(chip.kind, shape), num_sms=chip.num_cores)

    def _shape(self) -> tuning.KernelShape:
        spec, dim = self.spec, kernel_dim(self.spec)
        assert spec.page_size is not None
        return tuning.KernelShape(spec.num_heads, spec.num_kv_heads, dim, dim, spec.page_size, spec.kv_dtype)


def kernel_dim(spec: AttentionSpec) -> int:
    """Of a head as the kernels get it: of their sizes the next one, if there is one."""
    from jaxserve.kernels.pallas.gpu.decode import HEAD_DIMS

    sizes = (keys for keys, values in HEAD_DIMS if keys == values >= spec.head_dim)
    return min(sizes, default=spec.head_dim)


def _filled_up(qkv: jax.Array, rotary: Rotary | None, head_dim: int) -> jax.Array:
    """qkv [T, Hkv, G + 2, D], normed and rotated, with zeros up to [T, Hkv, G + 2, head_dim]."""
    (T, Hkv, _, D), (q, k, v) = qkv.shape, split_and_rotate(qkv, rotary)
    rotated = jnp.concatenate([q.reshape(T, Hkv, -1, D), k[:, :, None], v[:, :, None]], axis=2)
    return jnp.pad(rotated, ((0, 0), (0, 0), (0, 0), (0, head_dim - D)))


def wrong_chip(spec: AttentionSpec) -> str | None:
    chip = spec.chip
    if chip.compute_capability is None:
        return f"it is for NVIDIA GPUs, {chip.kind or 'this GPU'} is another vendor's."
    major, minor = chip.compute_capability
    if major < 9:
        return (
            f"{chip.kind} has compute capability {major}.{minor}; the kernels multiply with wgmma and load by TMA, which begin "
            "with 9.0 (Hopper). --attention-backend reference runs there."
        )
    if major > 9:
        return (
            f"{chip.kind} has compute capability {major}.{minor}; the kernels are written for 9.0 (Hopper), whose wgmma later "
            "chips replaced by tcgen05 with tensor memory. --attention-backend reference runs there."
        )
    if jax.__version_info__ < OLDEST_JAX:
        return f"it needs JAX {'.'.join(map(str, OLDEST_JAX))} or newer, this is {jax.__version__}."
    return None


def _wrong_shape(spec: AttentionSpec) -> str | None:
    from jaxserve.kernels.pallas.gpu import decode, extend, write

    if spec.num_heads % spec.num_kv_heads:
        return f"{spec.num_heads} query heads are not a multiple of {spec.num_kv_heads} KV heads."
    assert spec.page_size is not None
    asked: dict[str, Any] = {
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": kernel_dim(spec),
        "page_size": spec.page_size,
        "dtype": spec.dtype,
        "kv_dtype": spec.kv_dtype,
    }
    return (
        decode.unsupported(**asked)
        or extend.unsupported(**asked)
        or write.unsupported(head_dim=kernel_dim(spec), group=spec.group, dtype=spec.dtype, pool_dtype=spec.kv_dtype)
    )
