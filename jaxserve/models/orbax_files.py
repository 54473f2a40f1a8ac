"""Our own checkpoints: the tree of parameters in the layout for one device, as an Orbax checkpoint in the folder `orbax`.

Restoring goes straight to the shardings of any mesh, of any number of devices: Orbax reads for every device what it holds. Only
fused matrices whose columns stand in another order for that many devices are rearranged on the devices afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.arrays import ALL_AXES, ArrayInfo
from jaxserve.models.decoder import ParamTree
from jaxserve.models.layouts import is_rearranged, spread
from jaxserve.models.names import map_named
from jaxserve.models.safetensors_files import CheckpointError

if TYPE_CHECKING:  # imported where it is used: that takes a quarter of a second, and most checkpoints are others
    from orbax.checkpoint import StandardCheckpointer

FOLDER = "orbax"


def find_orbax(model_path: Path) -> Path | None:
    """The Orbax checkpoint in a model folder, if it has one."""
    folder = model_path / FOLDER
    return folder if folder.is_dir() else None


def save_params(model_path: Path, params: ParamTree) -> None:
    """Writes weights, none of them derived, in the layout for one device (one-device mesh) into `model_path`/orbax.

    CheckpointError says why that was not possible; then something may be left in `model_path`.
    """
    from orbax.checkpoint import StandardCheckpointer

    folder = (model_path / FOLDER).absolute()
    logging.getLogger("asyncio").addFilter(_is_no_echo)
    try:
        with StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, _nested(_named(params)))
    except Exception as error:  # whatever Orbax, TensorStore and the file system raise
        raise CheckpointError(f"{folder} cannot be written: {_reason(error)}") from error


def _is_no_echo(record: logging.LogRecord) -> bool:
    """False for what asyncio says of the tensors behind the one whose failure is raised: Orbax writes many at once and looks at
    the first error, and the others are told when they are collected, whenever that is. So the filter stays."""
    error = record.exc_info[1] if record.exc_info else None
    return f"{FOLDER}.orbax-checkpoint-tmp" not in str(error)


def check_orbax(model_path: Path, single: Mapping[str, ArrayInfo]) -> None:
    """CheckpointError unless the arrays `single` describes are there with these shapes."""
    with _opened(model_path) as (checkpointer, folder):
        _check(checkpointer, folder, single)


def restore(
    model_path: Path,
    single: Mapping[str, ArrayInfo],
    stored: Mapping[str, ArrayInfo],
    mesh: Mesh,
    take: Callable[[str, jax.Array], None],
) -> None:
    """Gives `take` every array of `stored` by name, on `mesh`; `single` describes the same arrays for one device.

    CheckpointError names the folder and the tensor at fault.
    """
    wanted = {name: _stored_as(single[name], info, mesh) for name, info in stored.items()}
    with _opened(model_path) as (checkpointer, folder):
        _check(checkpointer, folder, single)
        # Not strict: the vocabulary may be padded with zeros up to the shape asked for.
        restored = _named(checkpointer.restore(folder, _nested(wanted), strict=False))
    for name, info in stored.items():
        take(name, _finish(restored.pop(name), single[name], info, mesh))


@contextlib.contextmanager
def _opened(model_path: Path) -> Iterator[tuple[StandardCheckpointer, Path]]:
    """A checkpointer and the folder to use it with; its errors become CheckpointErrors."""
    from orbax.checkpoint import StandardCheckpointer

    folder = find_orbax(model_path)
    if folder is None:
        raise CheckpointError(f"{model_path / FOLDER} does not exist; write it with `jaxserve convert`.")
    folder = folder.absolute()
    with StandardCheckpointer() as checkpointer:
        try:
            yield checkpointer, folder
        except CheckpointError:
            raise
        except Exception as error:  # whatever Orbax, TensorStore and the file system raise for a damaged folder
            raise CheckpointError(f"{folder} cannot be read as an Orbax checkpoint: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What the operating system said, if it did; else the first sentence of a TensorStore message of many lines, and the
    tensor that it is about, if it says so."""
    text = str(error)
    code = re.search(r"os_error_code='(\d+)'", text)
    if code:
        return f"{os.strerror(int(code[1]))}."
    tensor = re.search(r"'path': '([\w.]+)/'", text)
    first = text.split(" See full ")[0].split("\n")[0][:300] or type(error).__name__
    return f"tensor {tensor[1]}: {first}" if tensor else first


def _named(tree: Any) -> dict[str, Any]:
    """Dotted name -> leaf."""
    leaves: dict[str, Any] = {}
    map_named(leaves.__setitem__, tree)
    return leaves


def _nested(named: Mapping[str, Any]) -> dict[str, Any]:
    """What Orbax stores: dictionaries in dictionaries, by the parts of the names."""
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        *outer, last = name.split(".")
        node = tree
        for part in outer:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def _stored_as(single: ArrayInfo, info: ArrayInfo, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """What to ask Orbax for: the array as it will be, or as it is stored if it must be rearranged first."""
    if not is_rearranged(single, info, mesh.size):
        return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=NamedSharding(mesh, info.spec))
    divides = single.shape[0] % mesh.size == 0
    spec = PartitionSpec(ALL_AXES) if divides else PartitionSpec()
    return jax.ShapeDtypeStruct(single.shape, single.dtype, sharding=NamedSharding(mesh, spec))


def _finish(array: jax.Array, single: ArrayInfo, info: ArrayInfo, mesh: Mesh) -> jax.Array:
    tp_size = mesh.size
    if not is_rearranged(single, info, tp_size):
        return array
    # Not a new function each time: JAX would compile it again.
    move = jax.jit(spread, static_argnums=(1, 2), out_shardings=NamedSharding(mesh, info.spec))
    return move(array, info.anonymous, tp_size)


def _check(checkpointer: StandardCheckpointer, folder: Path, single: Mapping[str, ArrayInfo]) -> None:
    metadata = checkpointer.metadata(folder).item_metadata
    if metadata is None:
        raise CheckpointError(f"{folder} holds no complete Orbax checkpoint; write it again with `jaxserve convert`.")
    shapes = {name: tuple(leaf.shape) for name, leaf in _named(dict(metadata.tree)).items()}
    for name, info in single.items():
        if name not in shapes:
            raise CheckpointError(
                f"{folder}: tensor {name} is missing; what an older version wrote must be converted again (`jaxserve convert`)."
            )
        if shapes[name] != info.shape:
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {list(shapes[name])}, but config.json asks for {list(info.shape)}."
            )
