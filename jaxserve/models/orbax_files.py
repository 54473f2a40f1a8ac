"""Our own checkpoints: the tree of `params` in the layout for one device, as an Orbax checkpoint in the folder `orbax`.

Restoring goes straight to the shardings of any mesh, of any number of devices: Orbax reads for every device what it holds. Only
fused matrices whose columns stand in another order for that many devices are rearranged on the devices afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.config import ModelConfig
from jaxserve.models.layouts import is_rearranged, spread
from jaxserve.models.params import TENSOR_AXIS, ArrayInfo, ParamTree, abstract_params, map_named
from jaxserve.models.safetensors_files import CheckpointError

FOLDER = "orbax"


def find_orbax(model_path: Path) -> Path | None:
    """The Orbax checkpoint in a model folder, if it has one."""
    folder = model_path / FOLDER
    return folder if folder.is_dir() else None


def save_params(model_path: Path, params: ParamTree) -> None:
    """Writes weights in the layout for one device (one-device mesh) into `model_path`/orbax."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((model_path / FOLDER).absolute(), _keyed(params))


def restore_params(
    model_path: Path,
    config: ModelConfig,
    arrays: ParamTree,
    mesh: Mesh,
    advance: Callable[[int], Any],
) -> ParamTree:
    """The tree `arrays` describes, on `mesh`; `advance` is called once, with the bytes of all arrays.

    CheckpointError names the folder and the tensor at fault.
    """
    folder = find_orbax(model_path)
    if folder is None:
        raise CheckpointError(f"{model_path / FOLDER} does not exist; write it with `jaxserve convert`.")
    folder = folder.absolute()
    stored = jax.tree.map(lambda single, info: _stored_as(single, info, mesh), _single(config, arrays), arrays)
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            metadata = checkpointer.metadata(folder).item_metadata
            if metadata is None:
                raise CheckpointError(f"{folder} holds no complete Orbax checkpoint; write it again with `jaxserve convert`.")
            _check(folder, metadata.tree, _single(config, arrays))
            # Not strict: the vocabulary may be padded with zeros up to the shape asked for.
            restored = checkpointer.restore(folder, _keyed(stored), strict=False)
        except CheckpointError:
            raise
        except Exception as error:  # whatever Orbax, TensorStore and the file system raise for a damaged folder
            raise CheckpointError(f"{folder} cannot be read as an Orbax checkpoint: {_reason(error)}") from error
    unkeyed = {**restored, "layers": [restored["layers"][str(i)] for i in range(config.num_layers)]}
    params = jax.tree.map(
        lambda array, single, info: _finish(array, single, info, config, mesh), unkeyed, _single(config, arrays), arrays
    )
    advance(sum(info.num_bytes for info in jax.tree.leaves(arrays)))
    return params


def _reason(error: Exception) -> str:
    """The first sentence of a TensorStore message of many lines, and the tensor that it is about, if it says so."""
    text = str(error)
    tensor = re.search(r"'path': '([\w.]+)/'", text)
    first = text.split(" See full ")[0].split("\n")[0][:300] or type(error).__name__
    return f"tensor {tensor[1]}: {first}" if tensor else first


def _single(config: ModelConfig, arrays: ParamTree) -> ParamTree:
    return abstract_params(config, arrays["final_norm"].dtype, 1)


def _keyed(tree: ParamTree) -> ParamTree:
    """Layers under string keys: what Orbax stores of a list, and what it can be asked for."""
    return {**tree, "layers": {str(index): layer for index, layer in enumerate(tree["layers"])}}


def _stored_as(single: ArrayInfo, info: ArrayInfo, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """What to ask Orbax for: the array as it will be, or as it is stored if it must be rearranged first."""
    if not is_rearranged(single, info, mesh.shape[TENSOR_AXIS]):
        return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=NamedSharding(mesh, info.spec))
    divides = single.shape[0] % mesh.shape[TENSOR_AXIS] == 0
    spec = PartitionSpec(TENSOR_AXIS) if divides else PartitionSpec()
    return jax.ShapeDtypeStruct(single.shape, single.dtype, sharding=NamedSharding(mesh, spec))


def _finish(array: jax.Array, single: ArrayInfo, info: ArrayInfo, config: ModelConfig, mesh: Mesh) -> jax.Array:
    tp_size = mesh.shape[TENSOR_AXIS]
    if not is_rearranged(single, info, tp_size):
        return array
    move = jax.jit(lambda x: spread(x, info, config, tp_size), out_shardings=NamedSharding(mesh, info.spec))
    return move(array)


def _check(folder: Path, found: Any, wanted: ParamTree) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    map_named(lambda name, leaf: shapes.__setitem__(name, tuple(leaf.shape)), dict(found))

    def check(name: str, info: ArrayInfo) -> None:
        if name not in shapes:
            raise CheckpointError(
                f"{folder}: tensor {name} is missing; what an older version wrote must be converted again (`jaxserve convert`)."
            )
        if shapes[name] != info.shape:
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {list(shapes[name])}, but config.json asks for {list(info.shape)}."
            )

    map_named(check, wanted)
