"""How the extend kernel's result leaves: whole tiles by one copy per head and chunk of columns, others token by token.

Copies run on while the block's next item is computed; the next result waits until they have read theirs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.pallas.gpu.extend_plan import CHUNK_COLUMNS
from jaxserve.kernels.pallas.gpu.extend_tile import Shape, Tile


def store(s: Shape, tile: Tile, result: jax.Array, out: Any, chunks: Any) -> None:
    """Writes the consumer's own tokens, by way of `chunks` [num_chunks, 64, CHUNK_COLUMNS]."""
    is_whole = tile.end - tile.begin == s.wg_tokens
    # The last chunk may begin within the one before it, and must not overtake that on the way.
    columns = [min(start, s.head_dim_v - CHUNK_COLUMNS) for start in range(0, s.head_dim_v, CHUNK_COLUMNS)]
    for first in range(0, len(columns), s.num_chunks):
        part = list(enumerate(columns[first : first + s.num_chunks]))
        plgpu.wait_smem_to_gmem(0, wait_read_only=s.has_whole_chunks)
        for i, column in part:
            _write(chunks.at[i], result[:, column : column + CHUNK_COLUMNS])
        plgpu.commit_smem()

        def copy(token: Any, count: int, part: list[tuple[int, int]] = part) -> None:
            for head in range(s.wg_heads):
                for i, column in part:
                    source = chunks.at[i, pl.ds(head * s.wg_tokens + token, count)]
                    target = out.at[pl.ds(tile.first_token + token, count), tile.first_head + head]
                    plgpu.copy_smem_to_gmem(source, target.at[:, pl.ds(column, CHUNK_COLUMNS)])

        @pl.when(is_whole)
        def _whole() -> None:
            copy(0, s.wg_tokens)

        @pl.when(jnp.logical_not(is_whole))
        def _partial() -> None:
            lax.fori_loop(tile.begin, tile.end, lambda token, _: copy(token, 1), None)


def _write(chunk: Any, value: jax.Array) -> None:
    if hasattr(plgpu, "store"):
        plgpu.store(chunk, value, optimized=False)
    else:
        chunk[...] = value
