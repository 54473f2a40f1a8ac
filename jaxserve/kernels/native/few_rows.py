"""Products of few rows with a matrix by a C++ custom call (few_rows.cc), for float32 on CPUs.

They take as long as reading the matrix does. XLA on CPU reads it with one thread if there is one row, and copies it first if
there are a few. Numbers: benchmarks/results/cpu_step.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.kernels.native.library import FEW_ROWS, NoLibraryError, target_name

MOST_ROWS = 8


def are_available() -> bool:
    """Whether this machine has the custom call; builds it if need be."""
    try:
        target_name(FEW_ROWS)
    except NoLibraryError:
        return False
    return True


def multiply_few_rows(x: jax.Array, matrix: jax.Array, *, transposed: bool = False) -> jax.Array:
    """x [T, in] times matrix [in, out] (transposed: [out, in]) -> [T, out]; all float32, T at most MOST_ROWS.

    A row gets the same, to the last bit, whatever the others are and however many.
    """
    assert len(x) <= MOST_ROWS, x.shape
    size_out = matrix.shape[0 if transposed else 1]
    call = jax.ffi.ffi_call(target_name(FEW_ROWS), jax.ShapeDtypeStruct((len(x), size_out), jnp.float32))
    result: jax.Array = call(x, matrix, transposed=transposed)
    return result
