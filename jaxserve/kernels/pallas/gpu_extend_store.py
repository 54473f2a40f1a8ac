"""How the extend kernel's result leaves: whole tiles by one copy per head, others token by token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.pallas.gpu_extend_plan import STAGE_COLUMNS
from jaxserve.kernels.pallas.gpu_extend_tile import Shape, Tile


def store(s: Shape, wg: Any, whole: Tile, result: jax.Array, out: Any, scratch: dict[str, Any]) -> None:
    """Writes the tile's own tokens: whole tiles by one TMA copy per head, others token by token."""
    wg += jnp.minimum(whole.lead, 0)  # adds 0: buffers' addresses are computed here, and not kept over the main loop
    tile = whole.for_consumer(s, wg)
    result_smem = scratch["q0"].at[wg]
    result_smem[...] = result
    plgpu.commit_smem()
    is_whole = tile.end - tile.begin == s.wg_tokens

    @pl.when(is_whole)
    def _whole() -> None:
        for head in range(s.wg_heads):
            target = out.at[pl.ds(tile.first_token, s.wg_tokens), tile.first_head + head]
            plgpu.copy_smem_to_gmem(result_smem.at[pl.ds(head * s.wg_tokens, s.wg_tokens)], target)

    @pl.when(jnp.logical_not(is_whole))
    def _partial() -> None:
        for column in range(0, s.head_dim_v, STAGE_COLUMNS):
            _store_rows(s, tile, min(column, s.head_dim_v - STAGE_COLUMNS), result_smem, out, scratch["stage"].at[wg])

    plgpu.wait_smem_to_gmem(0)


def _store_rows(s: Shape, tile: Tile, column: int, result_smem: Any, out: Any, stage: Any) -> None:
    """Some columns of the tile's own tokens, by way of a buffer without swizzle, which alone can be copied row by row."""
    if column > 0:
        plgpu.wait_smem_to_gmem(0)
    columns = pl.ds(column, STAGE_COLUMNS)
    chunk = plgpu.layout_cast(result_smem[:, columns], plgpu.Layout.WGMMA)
    if hasattr(plgpu, "store"):
        plgpu.store(stage, chunk, optimized=False)
    else:
        stage[...] = chunk
    plgpu.commit_smem()

    def store_token(token: Any, _: None) -> None:
        for head in range(s.wg_heads):
            source = stage.at[pl.ds(head * s.wg_tokens + token, 1)]
            target = out.at[pl.ds(tile.first_token + token, 1), tile.first_head + head, columns]
            plgpu.copy_smem_to_gmem(source, target)

    lax.fori_loop(tile.begin, tile.end, store_token, None)
