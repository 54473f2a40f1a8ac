"""Weights onto their devices: from safetensors, from Orbax, or made up (`dummy`). Always the tree of `abstract_params`.

Of a safetensors checkpoint every device gets exactly the slices it holds: they are read, transposed and converted block by
block, a few arrays at a time, so the host never holds the model.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.models.arrays import ArrayInfo, Source, Stacked
from jaxserve.models.assembly import Assembly
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import ParamTree, abstract_params
from jaxserve.models.dummy import make_dummy
from jaxserve.models.names import stored_arrays
from jaxserve.models.orbax_files import check_orbax, find_orbax, restore
from jaxserve.models.stored_formats import Tensors, open_tensors
from jaxserve.progress import progress_bar

Bounds: TypeAlias = tuple[tuple[int, int], ...]  # per axis, [start, stop)

_MOST_THREADS = 8
# Transposing this many rows at a time keeps both sides in the cache: 3 times as fast as the whole matrix.
_TRANSPOSE_ROWS = 256
_LEAST_LENGTH = 1e-12  # what the length of a row is taken for if it is less


def load_params(
    path: str | Path,
    config: ModelConfig,
    mesh: Mesh,
    dtype: Any,
    load_format: str = "auto",
    progress: bool = True,
    *,
    seed: int = 0,
) -> ParamTree:
    """The weights of the model in folder `path`, sharded over `mesh` as `abstract_params` says, as arrays of `dtype`.

    load_format is one of auto, safetensors, orbax, dummy; auto takes Orbax if `path` was written by `convert`. `progress`
    is shown on stderr. `seed` is for dummy weights. CheckpointError (a ValueError) names the file and tensor at fault.
    """
    return load_arrays(path, lambda tp_size: abstract_params(config, dtype, tp_size), mesh, load_format, progress, seed=seed)


def load_arrays(
    path: str | Path,
    describe: Callable[[int], ParamTree],
    mesh: Mesh,
    load_format: str = "auto",
    progress: bool = True,
    *,
    seed: int = 0,
) -> ParamTree:
    """The same for any tree of ArrayInfo: `describe(tp_size)`."""
    folder, arrays = Path(path), describe(mesh.size)
    chosen = _choose_format(folder, load_format)
    total = sum(info.num_bytes for info in jax.tree.leaves(arrays))
    label = "Making dummy weights" if chosen == "dummy" else "Loading weights"
    with progress_bar(total, label, "B", show=progress) as bar:
        assembly = Assembly(arrays, mesh, bar.update)
        if chosen == "dummy":
            make_dummy(stored_arrays(describe(1)), assembly.stored, mesh, seed, assembly.take)
        elif chosen == "orbax":
            restore(folder, stored_arrays(describe(1)), assembly.stored, mesh, assembly.take)
        else:
            read_safetensors(folder, assembly.stored, mesh, assembly.take)
        return jax.block_until_ready(assembly.params())


def check_params(path: str | Path, config: ModelConfig, mesh: Mesh, dtype: Any, load_format: str = "auto") -> None:
    """CheckpointError, as `load_params` would raise it, for what can be seen without reading any tensor's elements."""
    folder = Path(path)
    chosen = _choose_format(folder, load_format)
    if chosen == "orbax":
        check_orbax(folder, stored_arrays(abstract_params(config, dtype, 1)))
    elif chosen == "safetensors":
        stored = stored_arrays(abstract_params(config, dtype, mesh.size))
        _check_tensors(open_tensors(folder), stored)


def _choose_format(folder: Path, load_format: str) -> str:
    if load_format not in ("auto", "safetensors", "orbax", "dummy"):
        raise ValueError(f"--load-format must be auto, safetensors, orbax or dummy; got {load_format!r}.")
    if load_format != "auto":
        return load_format
    return "safetensors" if find_orbax(folder) is None else "orbax"


def read_safetensors(folder: Path, stored: Mapping[str, ArrayInfo], mesh: Mesh, take: Callable[[str, jax.Array], None]) -> None:
    """Gives `take` every array of `stored` by name, from several threads. All tensors are checked before any is read.

    Over several processes in the order of `stored`: what `take` computes of them, all must launch in one order."""
    checkpoint = open_tensors(folder)
    _check_tensors(checkpoint, stored)

    def load(name: str) -> jax.Array:
        return _load_array(checkpoint, stored[name], NamedSharding(mesh, stored[name].spec))

    num_threads = min(_MOST_THREADS, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="load-weights")
    try:
        if mesh.is_multi_process:
            for name, array in zip(stored, _in_order(pool, load, stored, num_threads), strict=True):
                take(name, array)
        else:
            list(pool.map(lambda name: take(name, load(name)), stored))
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: ThreadPoolExecutor, load: Callable[[str], jax.Array], names: Iterable[str], most_ahead: int
) -> Iterator[jax.Array]:
    """Loads them in threads, so many ahead of the one that is taken."""
    loading: collections.deque[Future[jax.Array]] = collections.deque()
    for name in names:
        loading.append(pool.submit(load, name))
        if len(loading) > most_ahead:
            yield loading.popleft().result()
    while loading:
        yield loading.popleft().result()


def _check_tensors(checkpoint: Tensors, stored: Mapping[str, ArrayInfo]) -> None:
    for info in stored.values():
        for name, shape in _tensors(checkpoint, info):
            checkpoint.check(name, shape)


def _tensors(checkpoint: Tensors, info: ArrayInfo) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what an array is read from."""
    assert isinstance(info.source, Source | Stacked), info  # stored arrays are not derived
    if isinstance(info.source, Source):
        yield from zip(info.source.names, info.source.shapes, strict=True)
        return
    sources, is_fused = _of_experts(checkpoint, info.source)
    for source in sources[:1] if is_fused else sources:
        yield from zip(source.names, source.shapes, strict=True)


def _of_experts(checkpoint: Tensors, stacked: Stacked) -> tuple[tuple[Source, ...], bool]:
    """One for each expert, and whether all are in the same tensor."""
    (name,) = stacked.fused[0].names
    is_fused = not stacked.parts or checkpoint.has(name)
    return (stacked.fused if is_fused else stacked.parts), is_fused


def _load_array(checkpoint: Tensors, info: ArrayInfo, sharding: NamedSharding) -> jax.Array:
    blocks: dict[Bounds, np.ndarray] = {}  # devices that hold the same slice share the reading
    shards = []
    for device, index in sharding.addressable_devices_indices_map(info.shape).items():
        assert index is not None
        bounds = tuple(axis.indices(size)[:2] for axis, size in zip(index, info.shape, strict=True))
        if bounds not in blocks:
            blocks[bounds] = _read_block(checkpoint, info, bounds)
        shards.append(jax.device_put(blocks[bounds], device))
    return jax.block_until_ready(jax.make_array_from_single_device_arrays(info.shape, sharding, shards))


def _read_block(checkpoint: Tensors, info: ArrayInfo, bounds: Bounds) -> np.ndarray:
    """Elements [start, stop) per axis of the array, in a fresh buffer: JAX may keep the buffer itself on CPU."""
    block, source = np.empty([stop - start for start, stop in bounds], info.dtype), info.source
    if isinstance(source, Source):
        _fill(block, checkpoint, source, bounds)
        return block
    assert isinstance(source, Stacked), info
    experts, *of_matrix = bounds
    sources, _ = _of_experts(checkpoint, source)
    for expert, matrix in zip(range(*experts), block, strict=True):
        _fill(matrix, checkpoint, sources[expert], tuple(of_matrix))
    return block


def _fill(block: np.ndarray, checkpoint: Tensors, source: Source, bounds: Bounds) -> None:
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
                first, last = (piece.start + (place - row) * piece.step for place in (start, stop - 1))
                index = (
                    slice(first, last + 1),
                    *(slice(source.first_column + begin, source.first_column + end) for begin, end in columns),
                )
                _copy(target, _read(checkpoint, source, piece.tensor, index)[:: piece.step], unit_rows=source.unit_rows)
        row += piece.count
    assert row >= last_row, (row, last_row, source.names)


def _read(checkpoint: Tensors, source: Source, tensor: int, index: tuple[slice, ...]) -> np.ndarray:
    """Of tensor number `tensor`, [out] or [out, in], these rows and columns."""
    name, in_file = source.names[tensor], index[::-1] if source.in_first else index
    if source.of_conv:
        rows = checkpoint.read(name, (index[0], slice(0, 1), *index[1:]))[:, 0]
    elif source.matrix is None:
        rows = checkpoint.read(name, in_file)
    else:
        rows = checkpoint.read(name, (slice(source.matrix, source.matrix + 1), *in_file))[0]
    return rows.T if source.in_first else rows


def _copy(target: np.ndarray, rows: np.ndarray, *, unit_rows: bool = False) -> None:
    """Copies and converts; `target` may be a transposed view."""
    if rows.dtype == target.dtype and rows.dtype.itemsize == 2 and not unit_rows:
        # As integers: the copy of a bfloat16 array holds the interpreter lock, that of an integer array does not.
        rows, target = rows.view(np.uint16), _as_uint16(target)
    for start in range(0, len(rows), _TRANSPOSE_ROWS):
        part = rows[start : start + _TRANSPOSE_ROWS]
        target[start : start + _TRANSPOSE_ROWS] = _of_unit_length(part) if unit_rows else part


def _of_unit_length(rows: np.ndarray) -> np.ndarray:
    """float32; rows of zeros stay."""
    wide = rows.astype(np.float32)
    return np.asarray(wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), _LEAST_LENGTH))


def _as_uint16(array: np.ndarray) -> np.ndarray:
    """The same memory as integers. A view of a transposed array must be taken on the array as it lies in memory."""
    return array.view(np.uint16) if array.flags.c_contiguous else array.T.view(np.uint16).T
