"""New queries, keys and values on Hopper: norm, rotation, quantization and the write into the paged pool, in one kernel.

A tile is a few tokens and KV heads. Its slice of `qkv` comes to shared memory by TMA; one warpgroup norms and rotates queries
and keys where they lie; TMA then takes the queries to their own array and each token's [key | value] rows, of all the tile's
heads at once, to wherever in the pool they belong. Values that are not quantized never pass through registers. Tiles are
independent blocks, several to an SM: while one computes, others load and store.

`write_rows_xla` is the same write as a scatter, for what the kernel does not support.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.typing
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.metadata import NO_PAGE
from jaxserve.kernels.pallas.gpu.common import SMEM_BYTES
from jaxserve.kernels.rotary import ZERO_BELOW, Rotary, quantize_rows, quantized_max

WARPS = 4
LANES = 32
# A TMA copy starts in shared memory at a multiple of this many bytes, and moves no more than 256 elements along a dimension.
TMA_ALIGNMENT = 128
TMA_BOX = 256


@dataclasses.dataclass(frozen=True)
class WriteConfig:
    """Chosen by reasoning, not timed."""

    max_tokens: int = 8  # two per warp: rotations are loaded once for all heads, and eight pool copies are in flight
    few_tokens: int = 4  # where the grid would leave SMs idle: one per warp
    min_blocks: int = 264  # two per SM of an H200
    tile_bytes: int = 24 * 1024  # of qkv; eight blocks per SM have 192 KB in flight
    max_values: int = 8  # per thread, of each half of the rows that are rotated together: more take registers from other blocks


DEFAULT = WriteConfig()


class Sources(NamedTuple):
    """The kernel's inputs, as arrays outside and as refs inside; None for what a call does not have."""

    qkv: (
        Any  # [T, Hkv, G + 2, 1, D]: compilers tile a second-last dimension that is a multiple of 8, and then G + 2 must be one
    )
    slot_pages: Any  # int32 [T]
    slot_offsets: Any
    page_offset: Any  # int32 [1]
    cos: Any  # float32 [T, D / 2]
    sin: Any
    q_norm: Any  # [D]
    k_norm: Any


@dataclasses.dataclass(frozen=True)
class Tile:
    """The static sizes of one call."""

    tokens: int
    heads: int  # KV heads
    group: int  # queries per KV head; 0 if there are only keys and values
    head_dim: int
    eps: float
    dtype: Any
    pool_dtype: Any
    config: WriteConfig

    @property
    def half(self) -> int:
        return self.head_dim // 2

    @property
    def is_quantized(self) -> bool:
        return self.pool_dtype != self.dtype

    @property
    def lanes(self) -> int:
        """Lanes that share a row's half; the others of the warp repeat them, since two rows would meet in the same banks."""
        return math.gcd(self.half, LANES)

    @property
    def queries_at_once(self) -> int:
        """Queries per KV head that are rotated together: as many as registers allow."""
        per_query = -(-self.tokens // WARPS) * self.half // self.lanes
        fitting = [n for n in range(1, self.group + 1) if self.group % n == 0 and n * per_query <= self.config.max_values]
        return max(fitting, default=1)

    def layout(self) -> Any:
        """Registers of [tokens, n, half]: tokens over warps, columns over lanes, up to 8 bytes of a row per access."""
        warps = math.gcd(self.tokens, WARPS)
        vector = math.gcd(self.half // self.lanes, 4)
        repeat = plgpu.Replicated
        columns = self.lanes * vector
        tiled = mgpu.TiledLayout(
            plgpu.Tiling(((warps, 1, columns), (1, 1, columns), (1, 1, vector))),
            warp_dims=((-9,) if warps > 1 else ()) + ((repeat(WARPS // warps),) if warps < WARPS else ()),
            lane_dims=((repeat(LANES // self.lanes),) if self.lanes < LANES else ()) + (-4,),
            vector_dim=-1,
            _check_canonical=False,
        ).canonicalize()
        return plgpu.Layout.TILED(tiled.tiling, tiled.warp_dims, tiled.lane_dims, tiled.vector_dim)


def unsupported(*, head_dim: int, group: int, dtype: jax.typing.DTypeLike, pool_dtype: jax.typing.DTypeLike) -> str | None:
    """Why the kernel cannot do this, as a sentence, or None. `write_rows_xla` can."""
    dtype, pool_dtype = jnp.dtype(dtype), jnp.dtype(pool_dtype)
    if dtype.name not in ("bfloat16", "float16"):
        return f"it rotates bfloat16 and float16, not {dtype.name}."
    if pool_dtype != dtype and pool_dtype.name not in ("float8_e4m3fn", "int8"):
        return f"it stores {dtype.name}, float8_e4m3fn or int8, not {pool_dtype.name}."
    if head_dim % 16 or not 0 < head_dim <= TMA_BOX:
        return f"head_dim must be a multiple of 16 up to {TMA_BOX}, it is {head_dim}."
    if (group + 3) * head_dim * dtype.itemsize > SMEM_BYTES or group > TMA_BOX:
        return f"a KV head with {group} queries of {head_dim} does not fit into shared memory."
    return None


def rope_and_write(
    qkv: jax.Array,
    rotary: Rotary | None,
    pool: jax.Array,
    scales: jax.Array | None,
    slot_pages: jax.Array,
    slot_offsets: jax.Array,
    page_offset: jax.typing.ArrayLike,
    *,
    config: WriteConfig = DEFAULT,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Norms and rotates qkv [T, Hkv, G + 2, D] and writes keys and values: (q [T, Hkv * G, D], pool, scales).

    Token t's rows go to pool [P, Hkv, page_size, 2 D] at page_offset + slot_pages[t], slot_offsets[t]; a quantized pool has
    scales float32 [P, Hkv, 2, page_size]. Both are updated in place if they are donated or carried. Tokens with slot_pages of
    NO_PAGE or more write nothing; their q is unspecified. No two tokens may have the same slot. Numerics are those of
    `split_and_rotate` and `quantize_rows`. Raises NotImplementedError with the reason for what the kernel does not support.
    """
    T, num_kv_heads, rows, D = qkv.shape
    reason = unsupported(head_dim=D, group=rows - 2, dtype=qkv.dtype, pool_dtype=pool.dtype)
    if reason is not None:
        raise NotImplementedError(f"rope_and_write: {reason}")
    assert pool.shape[1::2] == (num_kv_heads, 2 * D), f"qkv {qkv.shape}, pool {pool.shape}"
    tile = _tile(qkv.shape, qkv.dtype, pool.dtype, rotary.eps if rotary else 0.0, config)
    assert (scales is not None) == tile.is_quantized, f"scales are for quantized pools; this one is {pool.dtype}"
    sources = _sources(qkv, rotary, slot_pages, slot_offsets, page_offset)
    # The queries' array exists even if there are none: a kernel must have an output.
    q_type = jax.ShapeDtypeStruct((T, num_kv_heads, tile.group, 1, D) if tile.group else (1,), qkv.dtype)
    pool_ref = jax.new_ref(pool.reshape(*pool.shape[:-1], 2, D))
    scales_ref = None if scales is None else jax.new_ref(scales)
    present = [x for x in (*sources, pool_ref, scales_ref) if x is not None]
    is_present = [x is not None for x in (*sources, pool_ref, scales_ref)]

    def body(*refs: Any) -> None:
        given = iter(refs[: len(present)])
        *inputs, pool_out, scales_out = [next(given) if has else None for has in is_present]
        _write_tile(tile, Sources(*inputs), pool_out, scales_out, *refs[len(present) :])

    q = plgpu.kernel(
        body,
        out_type=q_type,
        grid=(T // tile.tokens, num_kv_heads // tile.heads),
        grid_names=("tokens", "heads"),
        scratch_types=_scratch(tile),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name="rope_and_write",
    )(*present)
    return (
        q.reshape(T, -1, D) if tile.group else jnp.zeros((T, 0, D), qkv.dtype),
        jax.freeze(pool_ref).reshape(pool.shape),
        None if scales_ref is None else jax.freeze(scales_ref),
    )


def write_rows(
    pool: jax.Array,
    scales: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    slot_pages: jax.Array,
    slot_offsets: jax.Array,
    page_offset: jax.typing.ArrayLike,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """`rope_and_write` for keys and values [T, Hkv, D] that are ready: (pool, scales)."""
    qkv = jnp.stack([k, v], axis=2)
    return rope_and_write(qkv, None, pool, scales, slot_pages, slot_offsets, page_offset, interpret=interpret)[1:]


def write_rows_xla(
    pool: jax.Array,
    scales: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    slot_pages: jax.Array,
    slot_offsets: jax.Array,
    page_offset: jax.typing.ArrayLike,
) -> tuple[jax.Array, jax.Array | None]:
    """The same as a scatter, in XLA: k [T, Hkv, Dk] and v [T, Hkv, Dv] of any type and size. Also in place."""
    if scales is None:
        return scatter_rows(pool, jnp.concatenate([k, v], axis=-1), slot_pages, slot_offsets, page_offset), None
    (k, k_scale), (v, v_scale) = quantize_rows(k, pool.dtype), quantize_rows(v, pool.dtype)
    pool = scatter_rows(pool, jnp.concatenate([k, v], axis=-1), slot_pages, slot_offsets, page_offset)
    both = jnp.stack([k_scale, v_scale], axis=-1)
    return pool, _scatter(scales, both, slot_pages + page_offset, slice(None), slice(None), slot_offsets)


def scatter_rows(
    pool: jax.Array, rows: jax.Array, slot_pages: jax.Array, slot_offsets: jax.Array, page_offset: jax.typing.ArrayLike
) -> jax.Array:
    """Rows [T, Hkv, D] into pool [P, Hkv, page_size, D], in its type and in place."""
    return _scatter(pool, rows.astype(pool.dtype), slot_pages + page_offset, slice(None), slot_offsets)


def _scatter(target: jax.Array, update: jax.Array, *index: Any) -> jax.Array:
    return target.at[index].set(update, mode="drop", unique_indices=True, wrap_negative_indices=False)


def _tile(shape: tuple[int, ...], dtype: Any, pool_dtype: Any, eps: float, config: WriteConfig) -> Tile:
    """Tokens and heads per block: large enough to keep many bytes in flight, small enough to use all SMs."""
    T, num_kv_heads, rows, D = shape
    tokens = math.gcd(T, config.max_tokens)
    if T // tokens * num_kv_heads < config.min_blocks:
        tokens = math.gcd(T, config.few_tokens)
    # A token's rows start at a multiple of TMA_ALIGNMENT if so many heads lie together, or if it is the tile's only token.
    step = TMA_ALIGNMENT // math.gcd(2 * D * jnp.dtype(pool_dtype).itemsize, TMA_ALIGNMENT)
    if num_kv_heads % step:
        tokens = step = 1
    head_bytes = rows * D * jnp.dtype(dtype).itemsize
    while tokens > 1 and tokens * step * head_bytes > SMEM_BYTES // 2:
        tokens //= 2

    def is_good(heads: int) -> bool:
        fits = tokens * heads * head_bytes <= config.tile_bytes
        return num_kv_heads % heads == 0 and fits and T // tokens * (num_kv_heads // heads) >= config.min_blocks

    good = [heads for heads in range(step, min(num_kv_heads, TMA_BOX) + 1, step) if is_good(heads)]
    return Tile(tokens, max(good, default=step), rows - 2, D, eps, jnp.dtype(dtype), jnp.dtype(pool_dtype), config)


def _sources(
    qkv: jax.Array, rotary: Rotary | None, slot_pages: jax.Array, slot_offsets: jax.Array, page_offset: Any
) -> Sources:
    offset = jnp.asarray(page_offset, jnp.int32).reshape(1)
    qkv = jnp.expand_dims(qkv, 3)
    if rotary is None:
        return Sources(qkv, slot_pages, slot_offsets, offset, None, None, None, None)
    for weight in (rotary.q_norm, rotary.k_norm):
        assert weight is None or weight.dtype == qkv.dtype, f"norm weights are {weight.dtype}, qkv {qkv.dtype}"
    return Sources(qkv, slot_pages, slot_offsets, offset, rotary.cos, rotary.sin, rotary.q_norm, rotary.k_norm)


class Buffers(NamedTuple):
    """Shared memory of one block."""

    q: Any  # [tokens, heads, G, 1, D]
    kv: Any  # [tokens, heads, 2, D] in qkv's type
    quantized: Any  # the same in the pool's
    scales: Any  # float32 [tokens, heads, 2]


def _scratch(tile: Tile) -> list[Any]:
    shape = (tile.tokens, tile.heads)
    buffers = [plgpu.SMEM((*shape, 2, tile.head_dim), tile.dtype)]
    if tile.group:
        buffers.append(plgpu.SMEM((*shape, tile.group, 1, tile.head_dim), tile.dtype))
    if tile.is_quantized:
        buffers.append(plgpu.SMEM((*shape, 2, tile.head_dim), tile.pool_dtype))
        buffers.append(plgpu.SMEM((*shape, 2), jnp.float32))
    return [plgpu.Barrier(num_arrivals=2 if tile.group else 1, num_barriers=1), *buffers]


def _buffers(tile: Tile, kv: Any, *rest: Any) -> Buffers:
    others = list(rest)
    q = others.pop(0) if tile.group else None
    return Buffers(q, kv, *(others if tile.is_quantized else (None, None)))


def _write_tile(tile: Tile, src: Sources, pool: Any, scales: Any, q_out: Any, loaded: Any, *scratch: Any) -> None:
    """The kernel: one block's tile."""
    bufs = _buffers(tile, *scratch)
    first = lax.axis_index("tokens") * tile.tokens
    first_head = lax.axis_index("heads") * tile.heads
    tokens, heads = pl.ds(first, tile.tokens), pl.ds(first_head, tile.heads)
    plgpu.copy_gmem_to_smem(src.qkv.at[tokens, heads, pl.ds(tile.group, 2), 0], bufs.kv, loaded)
    if tile.group:
        plgpu.copy_gmem_to_smem(src.qkv.at[tokens, heads, pl.ds(0, tile.group)], bufs.q, loaded)
    # All loads from global memory are under way before the first wait.
    slots = [(src.slot_pages[first + i], src.slot_offsets[first + i]) for i in range(tile.tokens)]
    page_offset = src.page_offset[0]
    math_ = _Math(tile, src, tokens) if src.cos is not None else None
    plgpu.barrier_wait(loaded)
    if math_ is not None or tile.is_quantized:
        _compute(tile, math_, bufs)
    plgpu.commit_smem()
    for i, (page, offset) in enumerate(slots):

        @pl.when(page < NO_PAGE)
        def _store(i: int = i, page: Any = page, offset: Any = offset) -> None:
            rows = bufs.quantized if tile.is_quantized else bufs.kv
            plgpu.copy_smem_to_gmem(rows.at[i], pool.at[page + page_offset, heads, offset])
            if tile.is_quantized:
                _store_scales(tile, bufs.scales, i, scales, page + page_offset, first_head, offset)

    if tile.group:
        plgpu.copy_smem_to_gmem(bufs.q, q_out.at[tokens, heads])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _compute(tile: Tile, math_: Any, bufs: Buffers) -> None:
    """Norms, rotates and quantizes the tile in shared memory, one KV head after the other."""

    @pl.loop(0, tile.heads)
    def _head(head: Any) -> None:
        if math_ is not None:
            for start in range(0, tile.group, tile.queries_at_once):
                math_.rotate(bufs.q.at[:, head, pl.ds(start, tile.queries_at_once), 0], is_key=False)
            math_.rotate(bufs.kv.at[:, head, pl.ds(0, 1)], is_key=True)
        if tile.is_quantized:
            _quantize(tile, bufs, head)


def _halves(tile: Tile, rows: Any) -> list[Any]:
    """Refs to the two halves of rows [tokens, n, D] that rotate into each other."""
    return [rows.at[:, :, pl.ds(start, tile.half)] for start in (0, tile.half)]


def _load(tile: Tile, rows: Any) -> list[Any]:
    """Both halves as float32. Not "optimized", which is for tiled buffers: the layout itself has no bank conflicts."""
    return [plgpu.load(ref, layout=tile.layout(), optimized=False).astype(jnp.float32) for ref in _halves(tile, rows)]


def _spread(tile: Tile, x: Any, n: int, dims: tuple[int, ...]) -> Any:
    """Broadcasts x, whose dimensions are `dims` of the three, to [tokens, n, half]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (tile.tokens, n, tile.half), dims), tile.layout())


class _Math:
    """The rotations of a tile's tokens and the norms' weights, in registers."""

    def __init__(self, tile: Tile, src: Sources, tokens: Any) -> None:
        self.tile = tile
        per_token, per_column = tile.layout().reduce((1,)), tile.layout().reduce((0, 1))
        self.cos, self.sin = (plgpu.load(x.at[tokens], layout=per_token, optimized=False) for x in (src.cos, src.sin))
        self.weights: list[Any] = [None, None]  # of queries and keys; each is two halves
        if src.q_norm is not None:
            self.weights = [
                [plgpu.load(weight.at[pl.ds(start, tile.half)], layout=per_column, optimized=False) for start in (0, tile.half)]
                for weight in (src.q_norm, src.k_norm)
            ]

    def rotate(self, rows: Any, *, is_key: bool) -> None:
        """Norms and rotates rows [tokens, n, D] in place."""
        tile, n = self.tile, rows.shape[1]
        a, b = _load(tile, rows)
        if self.weights[is_key] is not None:
            a, b = self._norm(a, b, self.weights[is_key])
        cos, sin = (_spread(tile, x, n, (0, 2)) for x in (self.cos, self.sin))
        first, second = _halves(tile, rows)
        first[...] = (a * cos - b * sin).astype(tile.dtype)
        second[...] = (b * cos + a * sin).astype(tile.dtype)

    def _norm(self, a: Any, b: Any, weight: Any) -> tuple[Any, Any]:
        """Rounds where `rms_norm` does."""
        tile, n = self.tile, a.shape[1]
        squares = jnp.sum(a * a + b * b, axis=2)
        scale = _spread(tile, lax.rsqrt(squares * (1 / tile.head_dim) + tile.eps), n, (0, 1))

        def normed(x: Any, half: int) -> Any:
            rounded = (x * scale).astype(tile.dtype)
            return (_spread(tile, weight[half], n, (2,)) * rounded).astype(jnp.float32)

        return normed(a, 0), normed(b, 1)


def _quantize(tile: Tile, bufs: Buffers, head: Any) -> None:
    """Keys and values of a KV head: as `quantize_rows`."""
    largest = quantized_max(tile.pool_dtype)
    halves = _load(tile, bufs.kv.at[:, head])
    peak = jnp.max(jnp.maximum(*(jnp.abs(x) for x in halves)), axis=2)  # [tokens, 2]
    is_zero = peak < ZERO_BELOW
    factor = _spread(tile, largest / jnp.where(is_zero, largest, peak), 2, (0, 1))
    targets = _halves(tile, bufs.quantized.at[:, head])
    for x, target in zip(halves, targets, strict=True):
        values = x * factor
        target[...] = (jnp.round(values) if tile.pool_dtype == jnp.int8 else values).astype(tile.pool_dtype)
    bufs.scales[:, head] = jnp.where(is_zero, 1.0, peak * (1 / largest))


def _store_scales(tile: Tile, buffer: Any, token: int, scales: Any, page: Any, first_head: Any, offset: Any) -> None:
    """Single float32 words, which TMA cannot write."""

    @pl.loop(0, tile.heads)
    def _head(head: Any) -> None:
        for which in range(2):
            scales[page, first_head + head, which, offset] = buffer[token, head, which]
