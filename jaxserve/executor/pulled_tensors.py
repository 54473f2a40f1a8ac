"""Arrays that another process offers, brought into this host's memory (jax.experimental.transfer).

They come to JAX's CPU device, whatever the model runs on: its devices have no room for them beside the weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from jaxserve.commands import OfferedTensor, PullTensors
from jaxserve.executor.distributed import own_address

_NUM_TRANSPORTS = 4  # connections for the bytes: one alone is half as fast
_POLL_S = 0.002


def pull(command: PullTensors) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array. ValueError, OSError or JaxRuntimeError if they do not all come in time, or are not what was said."""
    device = _cpu_device()
    described = [_described(tensor, device) for tensor in command.tensors]
    here = f"{own_address(command.address)}:0"
    # Opened for each pull, which takes milliseconds: the other side may have been started again in between.
    server = transfer.start_transfer_server(device.client, here, [here] * _NUM_TRANSPORTS)
    arrays = server.connect(command.address).pull(command.uuid, described)
    ended_s = time.monotonic() + command.timeout_s
    while not all(array.is_ready() for array in arrays):
        if time.monotonic() > ended_s:
            raise ValueError(
                f"The tensors of {command.address} have not come within {command.timeout_s:g} s: nobody answers there, or the "
                f"offer {command.uuid} was never made or is taken."
            )
        time.sleep(_POLL_S)
    yield from zip((tensor.name for tensor in command.tensors), map(np.asarray, arrays), strict=True)


def _cpu_device() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            "Tensors of other processes come to JAX's CPU device, and there is none: --device must be auto, and JAX_PLATFORMS, "
            "if it is set, name cpu as well."
        ) from error


def _described(tensor: OfferedTensor, device: jax.Device) -> jax.ShapeDtypeStruct:
    try:
        dtype = jnp.dtype(tensor.dtype)
    except TypeError as error:
        raise ValueError(f"The dtype of {tensor.name} must be one of an array's; got {tensor.dtype!r}.") from error
    return jax.ShapeDtypeStruct(tensor.shape, dtype, sharding=SingleDeviceSharding(device))
