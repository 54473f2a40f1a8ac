"""Low-rank adapters of float32 matrices on CPUs by a C++ custom call (low_rank.cc): each token with its own slot's alone."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.native.library import LOW_RANK, target_name


def add_low_rank(
    base: jax.Array, x: jax.Array, slots: jax.Array, a: jax.Array, b: Sequence[jax.Array], widths: Sequence[int]
) -> jax.Array:
    """base [T, out] + x [T, in] times what the tokens' slots hold (`LowRank`: a [S, in, P, R], b of each part [S, R, columns],
    widths of the parts in a period); slots int32 [T], -1 for what stays. All others float32.

    A token gets the same, to the last bit, whatever the others are and however many.
    """
    result = jax.ShapeDtypeStruct(base.shape, jnp.float32)
    call = jax.ffi.ffi_call(target_name(LOW_RANK), result, input_output_aliases={0: 0})
    periods = widths if len(b) > 1 else (b[0].shape[2],)
    added: jax.Array = call(base, x, slots, a, *b, widths=np.array(periods, np.int64))
    return added
