"""Zeros that take memory and time only where they are touched, by a C++ custom call (zero_pages.cc), on CPUs.

For a KV cache of which a request uses a page here and there. Numbers: benchmarks/results/startup.md.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxserve.kernels.native.library import ZERO_PAGES, target_name


def zero_pages(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Inside jit, on one device. Raises NoLibraryError where there is none."""
    # An effect, so that XLA does not make one array and copies of it where several are alike.
    call = jax.ffi.ffi_call(target_name(ZERO_PAGES), jax.ShapeDtypeStruct(shape.shape, shape.dtype), has_side_effect=True)
    zeros: Any = call()
    return zeros
