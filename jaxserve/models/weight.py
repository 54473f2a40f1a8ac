"""Weight: a matrix that multiplies itself, whatever it is stored as. A pytree of arrays, or of the ArrayInfo of them.

Matrices are [in, out]: x @ W. (XLA's CPU matmul reads that order 1.3 to 2 times as fast as [out, in].)
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxserve.models.grouped import Groups, grouped_matmul, matmul_precision


class Weight(Protocol):
    """To add a kind: a pytree class with this method, and the line of `Declare.weight` that chooses it.

    Its arrays are described by ArrayInfo; what is computed from the checkpoint's matrix has a `Derived` source.
    """

    def project(self, x: jax.Array, out_dtype: Any = None) -> jax.Array:
        """x [T, in] -> [T, out] of out_dtype (None: x's). Sums are float32."""
        ...

    def project_groups(self, x: jax.Array, groups: Groups) -> jax.Array:
        """x [T, in], sorted by group, times one of the matrices [groups, in, out] for each -> [T, out] of x's type.

        What rows of no group become is not defined.
        """
        ...


@dataclasses.dataclass(frozen=True)
class PlainWeight:
    """A matrix as it is."""

    matrix: Any  # [in, out]

    def project(self, x: jax.Array, out_dtype: Any = None) -> jax.Array:
        return jnp.dot(x, self.matrix, precision=matmul_precision(x), preferred_element_type=out_dtype or x.dtype)

    def project_groups(self, x: jax.Array, groups: Groups) -> jax.Array:
        return grouped_matmul(x, self.matrix, groups, x.dtype)


# Its only array bears the weight's own name ("layers.0.attn.o"): the empty key is left out of names (`names.map_named`).
jax.tree_util.register_pytree_with_keys(
    PlainWeight,
    lambda weight: (((jax.tree_util.DictKey(""), weight.matrix),), None),
    lambda _, children: PlainWeight(*children),
)


def in_float32(tree: Any) -> Any:
    """Weights for products in float32. Integers are exact in any type: they stay."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


def rounded_in_float32(x: jax.Array) -> jax.Array:
    """float32 of what x holds. A conversion alone would not do: XLA leaves out that x was rounded just before, and a step would
    have other numbers than what reads x later."""
    info = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=info.nexp, mantissa_bits=info.nmant)


def linear(x: jax.Array, weight: Any, bias: Any = None) -> jax.Array:
    """x [T, in] times a parameter that holds a Weight, plus one that holds a vector."""
    held: Weight = weight.get_value()
    out = held.project(x)
    return out if bias is None else out + bias[...]
