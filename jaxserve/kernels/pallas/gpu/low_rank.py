"""Low-rank adapters (LoRA) on Hopper, in two kernels of Triton's: each token times A and B of its own slot alone.

    shrink   a tile of one slot's tokens and a share of `in` -> what that share adds to the tokens' [P * R] numbers
    expand   a tile of one slot's tokens and some columns -> those columns of the tokens, in place

Tokens are sorted by slot, once for all layers of a step, and read and written where they stand; those without an adapter are
touched by neither kernel. The shares are added up where they are read, in their order, so a token gets the same in every step
of so many tokens. Proven by the interpreter and compiled; it has not been timed on a device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxserve.kernels.pallas.gpu.grouped import tiles_of_groups


@dataclasses.dataclass(frozen=True)
class LowRankConfig:
    """Chosen by reasoning, not timed."""

    rows: int = 16  # of a tile: the least that tensor cores multiply. In decode steps few tokens share a slot
    many_rows: int = 64  # the same from `many` tokens on
    many: int = 1024
    columns: int = 128  # of the result that a program of `expand` makes, at most
    depth: int = 64  # at most: of `in`, what is multiplied at a time
    shares: int = 8  # of `in`, at most: few programs would wait for memory one load after the other
    many_shares: int = 4  # each program of `expand` reads them all
    lines: int = 64  # at most: of P * R for a program of `shrink`, of R at a time in `expand`
    warps: int = 4
    stages: int = 4  # of loads in flight

    def tile(self, num_tokens: int) -> int:
        return self.many_rows if num_tokens >= self.many else self.rows

    def lines_for(self, size: int) -> int:
        """Of a block over `size` lines, the last of which may be filled in part: what tensor cores multiply, a power of 2."""
        return min(self.lines, max(16, pl.next_power_of_2(size)))

    def columns_for(self, widths: Sequence[int]) -> int:
        return math.gcd(self.columns, *widths)

    def cut(self, size_in: int, num_tokens: int) -> tuple[int, int]:
        """Shares of `in`, and how much of it is multiplied at a time."""
        depth = math.gcd(self.depth, size_in)
        shares = self.many_shares if num_tokens >= self.many else self.shares
        return math.gcd(shares, size_in // depth), depth


DEFAULT = LowRankConfig()
_LEAST_COLUMNS, _LEAST_DEPTH = 32, 16  # below that a tensor core, or a memory transaction, is not filled


class SlotTiles(NamedTuple):
    """Tokens that are sorted by slot, in tiles of one slot each."""

    order: jax.Array  # int32 [T]: tokens, those without a slot behind the others
    slots: jax.Array  # int32 [tiles]
    firsts: jax.Array  # int32 [tiles]: of `order`, a tile's first
    ends: jax.Array  # int32 [tiles]: where its slot's tokens end; 0 in tiles that are not needed

    @staticmethod
    def of(slots: jax.Array, num_slots: int, config: LowRankConfig = DEFAULT) -> SlotTiles:
        """`slots` int32 [T], -1 without one."""
        order = jnp.argsort(jnp.where(slots < 0, num_slots, slots)).astype(jnp.int32)
        sizes = jnp.sum(slots[:, None] == jnp.arange(num_slots), axis=0, dtype=jnp.int32)
        return SlotTiles(order, *tiles_of_groups(sizes, len(slots), config.tile(len(slots))))


def takes_low_rank(x: jax.Array, a: jax.Array, b: Sequence[jax.Array], widths: Sequence[int]) -> bool:
    """Whether the kernels compute this (`add_low_rank`). Float32 is left to products that are exact."""
    is_narrow = x.dtype in (jnp.bfloat16, jnp.float16) and all(matrix.dtype == x.dtype for matrix in (a, *b))
    columns = DEFAULT.columns_for(_periods(b, widths))
    return is_narrow and x.shape[1] % _LEAST_DEPTH == 0 and columns >= _LEAST_COLUMNS


def add_low_rank(
    base: jax.Array,
    x: jax.Array,
    tiles: SlotTiles,
    a: jax.Array,
    b: Sequence[jax.Array],
    widths: Sequence[int],
    config: LowRankConfig = DEFAULT,
    *,
    interpret: bool = False,
) -> jax.Array:
    """base [T, out] + x [T, in] times what the tokens' slots hold (`LowRank`: a [S, in, P, R], b of each part [S, R, columns],
    widths of the parts in a period of `out`); `tiles` of the same T, S and config. Sums are float32, P * R numbers in between
    are rounded to x's type."""
    shrunk = _shrink(x, tiles, a.reshape(*a.shape[:2], -1), config, interpret)
    return _expand(base, shrunk, tiles, b, _periods(b, widths), config, interpret)


def _periods(b: Sequence[jax.Array], widths: Sequence[int]) -> tuple[int, ...]:
    """Columns of each part that come together, of this device's."""
    return tuple(widths) if len(b) > 1 else (b[0].shape[2],)


def _call(kernel: Any, config: LowRankConfig, *, name: str, interpret: bool, **options: Any) -> Any:
    params = triton.CompilerParams(num_warps=config.warps, num_stages=config.stages)
    return pl.pallas_call(kernel, compiler_params=params, name=name, interpret=interpret, **options)


def _shrink(x: jax.Array, tiles: SlotTiles, a: jax.Array, config: LowRankConfig, interpret: bool) -> jax.Array:
    """x [T, in], a [S, in, P * R] -> float32 [shares, T, P * R] in the order of the tiles; nothing where there is no slot."""
    (num_tokens, size_in), num_lines = x.shape, a.shape[2]
    shares, depth = config.cut(size_in, num_tokens)
    block = config.lines_for(num_lines)
    kernel = functools.partial(
        _shrink_tile,
        rows=config.tile(num_tokens),
        depth=depth,
        steps=size_in // depth // shares,
        block=block,
        num_lines=num_lines,
    )
    shrunk: jax.Array = _call(
        kernel,
        config,
        name="low_rank_shrink",
        interpret=interpret,
        grid=(shares, pl.cdiv(num_lines, block), len(tiles.slots)),
        out_shape=jax.ShapeDtypeStruct((shares, num_tokens, num_lines), jnp.float32),
    )(*tiles, x, a)
    return shrunk


def _shrink_tile(
    order: Any,
    slots: Any,
    firsts: Any,
    ends: Any,
    x: Any,
    a: Any,
    shrunk: Any,
    *,
    rows: int,
    depth: int,
    steps: int,
    block: int,
    num_lines: int,
) -> None:
    share, first_line, number = pl.program_id(0), pl.program_id(1) * block, pl.program_id(2)
    slot, first, end = slots[number], firsts[number], ends[number]

    @pl.when(first < end)
    def _() -> None:
        place, is_mine, tokens = _tokens(order, first, end, rows)
        line = (first_line + jnp.arange(block))[None]
        is_line = line < num_lines

        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            inner = (share * steps + step) * depth + jnp.arange(depth)
            left = triton.load(x.at[tokens, inner[None]], mask=jnp.broadcast_to(is_mine, (rows, depth)), other=0)
            right = triton.load(a.at[slot, inner[:, None], line], mask=jnp.broadcast_to(is_line, (depth, block)), other=0)
            return total + triton.dot(left, right)

        total = jax.lax.fori_loop(0, steps, add, jnp.zeros((rows, block), jnp.float32))
        triton.store(shrunk.at[share, place, line], total, mask=is_mine & is_line)


def _expand(
    base: jax.Array,
    shrunk: jax.Array,
    tiles: SlotTiles,
    b: Sequence[jax.Array],
    periods: tuple[int, ...],
    config: LowRankConfig,
    interpret: bool,
) -> jax.Array:
    """base [T, out], whose memory the result takes."""
    num_tokens, size_out = base.shape
    columns = config.columns_for(periods)
    kernel = functools.partial(_expand_tile, rows=config.tile(num_tokens), columns=columns, periods=periods, config=config)
    added: jax.Array = _call(
        kernel,
        config,
        name="low_rank_expand",
        interpret=interpret,
        grid=(size_out // columns, len(tiles.slots)),
        out_shape=jax.ShapeDtypeStruct(base.shape, base.dtype),
        input_output_aliases={len(tiles): 0},
    )(*tiles, base, shrunk, *b)
    return added


def _expand_tile(
    order: Any,
    slots: Any,
    firsts: Any,
    ends: Any,
    base: Any,
    shrunk: Any,
    *b_and_out: Any,
    rows: int,
    columns: int,
    periods: tuple[int, ...],
    config: LowRankConfig,
) -> None:
    first_column, number = pl.program_id(0) * columns, pl.program_id(1)
    slot, first, end = slots[number], firsts[number], ends[number]
    (*b, out), (num_shares, _, _) = b_and_out, shrunk.shape
    in_period = first_column % sum(periods)
    before = 0
    for part, (matrix, width) in enumerate(zip(b, periods, strict=True)):
        here = in_period - before  # columns of the part that come before the program's in this period
        before += width

        @pl.when((first < end) & (here >= 0) & (here < width))
        def _(part: int = part, matrix: Any = matrix, width: int = width, here: Any = here) -> None:
            place, is_mine, tokens = _tokens(order, first, end, rows)
            column = jnp.arange(columns)[None]
            of_part = first_column // sum(periods) * width + here + column
            rank, block = matrix.shape[1], config.lines_for(matrix.shape[1])
            total = jnp.zeros((rows, columns), jnp.float32)
            for first_line in range(0, rank, block):
                line = first_line + jnp.arange(block)
                mask = is_mine & (line < rank)[None]
                left = jnp.zeros((rows, block), jnp.float32)
                for share in range(num_shares):
                    left += triton.load(shrunk.at[share, place, part * rank + line[None]], mask=mask, other=0)
                is_line = jnp.broadcast_to((line < rank)[:, None], (block, columns))
                right = triton.load(matrix.at[slot, line[:, None], of_part], mask=is_line, other=0)
                total += triton.dot(left.astype(right.dtype), right)
            mask = jnp.broadcast_to(is_mine, (rows, columns))
            total += triton.load(base.at[tokens, first_column + column], mask=mask, other=0).astype(jnp.float32)
            triton.store(out.at[tokens, first_column + column], total.astype(out.dtype), mask=mask)


def _tokens(order: Any, first: jax.Array, end: jax.Array, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of a tile, each [rows, 1]: places in `order`, which of them the tile has, and the tokens: of other places none, since the
    interpreter writes there what was there."""
    place = first + jnp.arange(rows)
    tokens = triton.load(order.at[place], mask=place < end, other=order.shape[0])
    return place[:, None], (place < end)[:, None], tokens[:, None]
