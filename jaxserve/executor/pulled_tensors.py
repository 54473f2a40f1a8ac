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
from jaxserve.executor.distributed import NUM_TRANSPORTS, cpu_device, own_address

_POLL_S = 0.002


def pull(command: PullTensors) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array. ValueError, OSError or JaxRuntimeError if they do not all come in time, or are not what was said."""
    device = cpu_device()
    described = [_described(tensor, device) for tensor in command.tensors]
    here = f"{own_address(command.address)}:0"
    # Opened for each pull, which takes milliseconds: the other side may have been started again in between.
    server = transfer.start_transfer_server(device.client, here, [here] * NUM_TRANSPORTS)
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


def _described(tensor: OfferedTensor, device: jax.Device) -> jax.ShapeDtypeStruct:
    try:
        dtype = jnp.dtype(tensor.dtype)
    except TypeError as error:
        raise ValueError(f"The dtype of {tensor.name} must be one of an array's; got {tensor.dtype!r}.") from error
    return jax.ShapeDtypeStruct(tensor.shape, dtype, sharding=SingleDeviceSharding(device))
