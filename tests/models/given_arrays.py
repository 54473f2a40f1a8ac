"""Arrays as a trainer has them, on devices of its own."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def trainer_mesh(first: int, *shape: int) -> Mesh:
    """Of the devices from that one on."""
    count = int(np.prod(shape))
    return Mesh(np.array(jax.devices()[first : first + count]).reshape(shape), ("fsdp", "tp")[: len(shape)])


def divided(array: np.ndarray, mesh: Mesh) -> jax.Array:
    """The first axes over the mesh's, where they divide evenly."""
    names = [name if size % mesh.shape[name] == 0 else None for size, name in zip(array.shape, mesh.axis_names, strict=False)]
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*names)))
