"""Several processes with one JAX: each has its own devices and sees all. With one process, nothing is done here."""

from __future__ import annotations

import contextlib
import hashlib
import socket

import jax
import numpy as np
from jax.experimental import multihost_utils

NUM_TRANSPORTS = 4  # connections between two processes for the bytes of arrays: one alone is half as fast


def start(
    coordinator: str, *, num_processes: int, rank: int, num_devices: int, timeout_s: float, hands_on: bool = False
) -> None:
    """Before JAX's first use in this process. The process of rank 0 listens at `coordinator`; all must come in time.
    `hands_on`: arrays go from devices of one process to those of another."""
    if hands_on:  # GPUs and TPUs need no address for it
        address = own_address(coordinator)
        jax.config.update("jax_cross_host_transfer_socket_address", f"{address}:{_free_port(address)}")
        jax.config.update("jax_cross_host_transport_addresses", ",".join([f"{address}:0"] * NUM_TRANSPORTS))
    jax.distributed.initialize(
        coordinator_address=coordinator,
        num_processes=num_processes,
        process_id=rank,
        local_device_ids=list(range(num_devices)),
        initialization_timeout=round(timeout_s),
        coordinator_bind_address=coordinator if rank == 0 else None,
    )


def own_address(there: str) -> str:
    """Of this machine, where others reach it as it reaches host:port `there`. Nothing is sent."""
    host, _, port = there.rpartition(":")
    family, kind, _, _, found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with contextlib.closing(socket.socket(family, kind)) as probe:
        probe.connect(found)
        address: str = probe.getsockname()[0]
    return f"[{address}]" if family == socket.AF_INET6 else address


def _free_port(address: str) -> int:
    """JAX tells others the number that it was given, so it must not be 0."""
    family = socket.AF_INET6 if address.startswith("[") else socket.AF_INET
    with contextlib.closing(socket.socket(family)) as probe:
        probe.bind((address.strip("[]"), 0))
        port: int = probe.getsockname()[1]
    return port


def cpu_device() -> jax.Device:
    """Of this process, beside whatever the model runs on; there arrays of other processes come from and go to. ValueError if
    JAX has none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            "Arrays go from process to process by JAX's CPU devices, and there is none here: --device must be auto, and "
            "JAX_PLATFORMS, if it is set, name cpu as well."
        ) from error


def is_alone() -> bool:
    return jax.process_count() == 1


def least(number: int) -> int:
    """Of what all processes say."""
    return number if is_alone() else int(multihost_utils.process_allgather(np.asarray(number, np.int32)).min())


def read(array: jax.Array | jax.ShapeDtypeStruct | None) -> np.ndarray:
    """Waits for it, which must be whole on each device. Zeros where it is not here: host 0 has all that anybody needs."""
    assert array is not None
    return np.asarray(array) if _is_here(array) else np.zeros(array.shape, array.dtype)


def start_reading(array: jax.Array | jax.ShapeDtypeStruct) -> None:
    """What `read` waits for."""
    if isinstance(array, jax.Array) and _is_here(array):
        array.copy_to_host_async()


def _is_here(array: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return isinstance(array, jax.Array) and bool(array.sharding.addressable_devices)


def check_alike(what: str, text: str) -> None:
    """ValueError if a process has another text, of which `what` is a name."""
    if is_alone():
        return
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    texts = multihost_utils.process_allgather(digest)
    if other := [rank for rank, theirs in enumerate(texts) if (theirs != texts[0]).any()]:
        raise ValueError(f"Host {other[0]} has another {what} than host 0.")
