"""Weights of float32 models on CPUs: products of few rows, those of small decode steps, are the custom call's, others XLA's."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.kernels.native.few_rows import MOST_ROWS, multiply_few_rows
from jaxserve.models.weight import PlainWeight


@dataclasses.dataclass(frozen=True)
class NativeWeight(PlainWeight):
    """A matrix as it is."""

    def project(self, x: jax.Array, out_dtype: Any = None) -> jax.Array:
        return multiply_few_rows(x, self.matrix) if _are_few(x) else super().project(x, out_dtype)


jax.tree_util.register_pytree_with_keys(
    NativeWeight,
    lambda weight: (((jax.tree_util.DictKey(""), weight.matrix),), None),
    lambda _, children: NativeWeight(*children),
)


@dataclasses.dataclass(frozen=True)
class TiedNativeWeight(PlainWeight):
    """An embedding as an output head."""

    table: Any  # the matrix as it is stored, [out, in]

    def project(self, x: jax.Array, out_dtype: Any = None) -> jax.Array:
        return multiply_few_rows(x, self.table, transposed=True) if _are_few(x) else super().project(x, out_dtype)


def _are_few(x: jax.Array) -> bool:
    assert x.dtype == jnp.float32, x.dtype
    return len(x) <= MOST_ROWS
