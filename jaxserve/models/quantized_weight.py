"""Int8Weight: a matrix in a byte per element, made of the checkpoint's while it is loaded (`--quantization int8wo`).

Symmetric, one float32 scale per output channel, so that scales are multiplied with results and the product reads int8: on TPUs
and GPUs the conversion is part of the product's kernel, and no converted weight is in memory. XLA on CPU does write one out.
Activations keep the model's type.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.arrays import ArrayInfo, Derived
from jaxserve.models.grouped import Groups, grouped_matmul
from jaxserve.models.weight import PlainWeight

_LARGEST = 127


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Weight:
    """A matrix is values * scales."""

    values: Any  # int8 [..., in, out]
    scales: Any  # float32 [..., out]

    def project(self, x: jax.Array, out_dtype: Any = None) -> jax.Array:
        product = PlainWeight(self.values.astype(x.dtype)).project(x, jnp.float32)
        return (product * self.scales).astype(out_dtype or x.dtype)

    def project_groups(self, x: jax.Array, groups: Groups) -> jax.Array:
        # Of x's type: for float32 results, XLA on GPUs would make the rows float32, too.
        product = grouped_matmul(x, self.values, groups, x.dtype)
        return (product * self.scales.at[groups.of_row].get(mode="clip")).astype(x.dtype)

    @staticmethod
    def of(matrix: ArrayInfo) -> Int8Weight:
        *outer, _, size_out = matrix.shape
        axes = (*matrix.logical_axes[:-2], matrix.logical_axes[-1])
        values = dataclasses.replace(matrix, dtype=np.dtype(np.int8), source=Derived(matrix, int8_values))
        scales = ArrayInfo((*outer, size_out), np.dtype(np.float32), axes, Derived(matrix, int8_scales), groups=matrix.groups)
        return Int8Weight(values, scales)


def int8_scales(matrix: jax.Array) -> jax.Array:
    """Of [..., in, out]: float32 [..., out], for which the largest magnitude of a channel is 127; 1 for channels of zeros."""
    peaks = jnp.max(jnp.abs(matrix.astype(jnp.float32)), axis=-2)
    return jnp.where(peaks == 0, 1.0, peaks / _LARGEST)


def int8_values(matrix: jax.Array) -> jax.Array:
    """Of [..., in, out]: the nearest int8, ties to even."""
    return jnp.round(matrix.astype(jnp.float32) / int8_scales(matrix)[..., None, :]).astype(jnp.int8)
