"""Weights onto their devices: from safetensors, from Orbax, or made up (`dummy`). Always the tree of `params`.

Of a safetensors checkpoint every device gets exactly the slices it holds: they are read, transposed and converted block by
block, a few arrays at a time, so the host never holds the model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm

from jaxserve.models.config import ModelConfig
from jaxserve.models.dummy import dummy_params
from jaxserve.models.orbax_files import find_orbax, restore_params
from jaxserve.models.params import TENSOR_AXIS, ArrayInfo, ParamTree, Source, abstract_params
from jaxserve.models.safetensors_files import SafetensorsCheckpoint

_MOST_THREADS = 8
# Transposing this many rows at a time keeps both sides in the cache: 3 times as fast as the whole matrix.
_TRANSPOSE_ROWS = 256


def load_params(
    path: str | Path,
    config: ModelConfig,
    mesh: Mesh,
    dtype: Any,
    load_format: str = "auto",
    progress: bool = True,
    *,
    stacked: bool = False,
    seed: int = 0,
) -> ParamTree:
    """The weights of the model in folder `path`, sharded over `mesh` as `params` says, as arrays of `dtype`.

    load_format is one of auto, safetensors, orbax, dummy; auto takes Orbax if `path` was written by `convert`. `progress`
    shows a bar on stderr. `seed` is for dummy weights. CheckpointError (a ValueError) names the file and tensor at fault.
    """
    arrays = abstract_params(config, dtype, mesh.shape[TENSOR_AXIS])
    chosen = load_format
    if chosen == "auto":
        chosen = "safetensors" if find_orbax(Path(path)) is None else "orbax"
    total = sum(info.num_bytes for info in jax.tree.leaves(arrays))
    label = "Making dummy weights" if chosen == "dummy" else "Loading weights"
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=not progress, file=sys.stderr) as bar:
        if chosen == "dummy":
            params = dummy_params(config, arrays, mesh, seed, bar.update)
        elif chosen == "orbax":
            params = restore_params(Path(path), config, arrays, mesh, bar.update)
        elif chosen == "safetensors":
            params = load_safetensors(Path(path), arrays, mesh, bar.update)
        else:
            raise ValueError(f"--load-format must be auto, safetensors, orbax or dummy; got {load_format!r}.")
    return (
        stack_layers(params, mesh, abstract_params(config, dtype, mesh.shape[TENSOR_AXIS], stacked=True)) if stacked else params
    )


def load_safetensors(folder: Path, arrays: ParamTree, mesh: Mesh, advance: Callable[[int], Any]) -> ParamTree:
    """`advance` is called with the bytes of every finished array. All tensors are checked before any is read."""
    checkpoint = SafetensorsCheckpoint(folder)
    infos, treedef = jax.tree.flatten(arrays)
    for info in infos:
        for name, shape in zip(info.source.names, info.source.shapes, strict=True):
            checkpoint.check(name, shape)

    def load(info: ArrayInfo) -> jax.Array:
        array = _load_array(checkpoint, info, NamedSharding(mesh, info.spec))
        advance(info.num_bytes)
        return array

    pool = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="load-weights")
    try:
        return jax.tree.unflatten(treedef, list(pool.map(load, infos)))
    finally:
        pool.shutdown(cancel_futures=True)


def stack_layers(params: ParamTree, mesh: Mesh, stacked: ParamTree) -> ParamTree:
    """Joins the layers' arrays on a leading axis, one kind of array at a time, and frees the single ones."""
    infos, treedef = jax.tree.flatten(stacked["layers"])
    columns = zip(*(jax.tree.leaves(layer) for layer in params["layers"]), strict=True)
    joined = []
    for info, column in zip(infos, columns, strict=True):
        join = jax.jit(lambda *arrays: jnp.stack(arrays), out_shardings=NamedSharding(mesh, info.spec))
        joined.append(jax.block_until_ready(join(*column)))
        for array in column:
            array.delete()
    return {**params, "layers": jax.tree.unflatten(treedef, joined)}


def _load_array(checkpoint: SafetensorsCheckpoint, info: ArrayInfo, sharding: NamedSharding) -> jax.Array:
    blocks: dict[tuple[tuple[int, int], ...], np.ndarray] = {}  # devices that hold the same slice share the reading
    shards = []
    for device, index in sharding.addressable_devices_indices_map(info.shape).items():
        assert index is not None
        bounds = tuple(axis.indices(size)[:2] for axis, size in zip(index, info.shape, strict=True))
        if bounds not in blocks:
            blocks[bounds] = _read_block(checkpoint, info, bounds)
        shards.append(jax.device_put(blocks[bounds], device))
    return jax.block_until_ready(jax.make_array_from_single_device_arrays(info.shape, sharding, shards))


def _read_block(checkpoint: SafetensorsCheckpoint, info: ArrayInfo, bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Elements [start, stop) per axis of the array, in a fresh buffer: JAX may keep the buffer itself on CPU."""
    assert info.source is not None, info
    source: Source = info.source
    block = np.empty([stop - start for start, stop in bounds], info.dtype)
    by_rows = block.T if source.transposed else block
    (first_row, last_row), *columns = reversed(bounds) if source.transposed else bounds
    row = 0  # of the whole array
    for piece in source.rows:
        start, stop = max(row, first_row), min(row + piece.count, last_row)
        if start < stop:
            target = by_rows[start - first_row : stop - first_row]
            if piece.tensor is None:
                target[...] = 0
            else:
                offset = piece.start - row
                rows = slice(start + offset, stop + offset)
                _copy(target, checkpoint.read(source.names[piece.tensor], (rows, *(slice(*bound) for bound in columns))))
        row += piece.count
    assert row >= last_row, (row, last_row, source.names)
    return block


def _copy(target: np.ndarray, rows: np.ndarray) -> None:
    """Copies and converts; `target` may be a transposed view."""
    if rows.dtype == target.dtype and rows.dtype.itemsize == 2:
        # As integers: the copy of a bfloat16 array holds the interpreter lock, that of an integer array does not.
        rows, target = rows.view(np.uint16), _as_uint16(target)
    for start in range(0, len(rows), _TRANSPOSE_ROWS):
        target[start : start + _TRANSPOSE_ROWS] = rows[start : start + _TRANSPOSE_ROWS]


def _as_uint16(array: np.ndarray) -> np.ndarray:
    """The same memory as integers. A view of a transposed array must be taken on the array as it lies in memory."""
    return array.view(np.uint16) if array.flags.c_contiguous else array.T.view(np.uint16).T
