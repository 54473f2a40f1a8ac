"""How many KV pages fit: measured, not guessed.

`mem_fraction_static` is the share of a device's memory that weights and KV cache may take together. The weights are loaded
and the largest step is compiled before the pool is sized, so what they take is known.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import psutil

# On CPU the pool is ordinary host memory, which other programs need too: without --max-total-tokens or
# --mem-fraction-static no more than this is taken.
CPU_POOL_LIMIT_BYTES = 2 * 2**30


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device."""

    total: int
    free: int


def measure(device: jax.Device) -> DeviceMemory:
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return DeviceMemory(stats["bytes_limit"], stats["bytes_limit"] - stats["bytes_in_use"])
    host = psutil.virtual_memory()
    return DeviceMemory(host.total, host.available)


def fit_pages(memory: DeviceMemory, *, mem_fraction: float, temp_bytes: int, page_bytes: int, page_size: int) -> int:
    """Pages (of all layers, on one device) that fit beside what is in use now and the step's temporaries.

    Raises ValueError with the numbers if not even one page fits.
    """
    reserved = int(memory.total * (1 - mem_fraction))
    budget = memory.free - max(reserved, temp_bytes)
    pages = budget // page_bytes
    if pages < 1:
        raise ValueError(
            f"No memory is left for the KV cache: {memory.free / 2**30:.2f} GiB are free, --mem-fraction-static "
            f"{mem_fraction} and the step's temporaries keep {max(reserved, temp_bytes) / 2**30:.2f} GiB of it, and a page of "
            f"{page_size} tokens takes {page_bytes / 2**20:.2f} MiB. Raise --mem-fraction-static or use more devices."
        )
    return pages


def limit_to_use(pages: int, *, page_bytes: int, max_rows: int, max_pages_per_row: int, cap_bytes: int | None) -> int:
    """Cuts a pool to what the rows could ever use twice over (once running, once cached) and to `cap_bytes`."""
    useful = 2 * max_rows * max_pages_per_row
    affordable = math.inf if cap_bytes is None else max(cap_bytes // page_bytes, 1)
    return int(min(pages, useful, affordable))
