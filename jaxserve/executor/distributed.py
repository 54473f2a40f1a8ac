"""Several processes with one JAX: each has its own devices and sees all. With one process, nothing is done here."""

from __future__ import annotations

import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils


def start(coordinator: str, *, num_processes: int, rank: int, num_devices: int, timeout_s: float) -> None:
    """Before JAX's first use in this process. The process of rank 0 listens at `coordinator`; all must come in time."""
    jax.distributed.initialize(
        coordinator_address=coordinator,
        num_processes=num_processes,
        process_id=rank,
        local_device_ids=list(range(num_devices)),
        initialization_timeout=round(timeout_s),
        coordinator_bind_address=coordinator if rank == 0 else None,
    )


def is_alone() -> bool:
    return jax.process_count() == 1


def least(number: int) -> int:
    """Of what all processes say."""
    return number if is_alone() else int(multihost_utils.process_allgather(np.asarray(number, np.int32)).min())


def check_alike(what: str, text: str) -> None:
    """ValueError if a process has another text, of which `what` is a name."""
    if is_alone():
        return
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    texts = multihost_utils.process_allgather(digest)
    if other := [rank for rank, theirs in enumerate(texts) if (theirs != texts[0]).any()]:
        raise ValueError(f"Host {other[0]} has another {what} than host 0.")
