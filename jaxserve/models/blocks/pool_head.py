"""What stands behind the pooling of hidden states: matrices, each perhaps with an activation and a norm.

They are small, and whole on every device. All of it is float32, whatever the type of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.arrays import ArrayInfo, Rows, Source
from jaxserve.models.blocks.declare import Declare
from jaxserve.models.blocks.mlp import activation
from jaxserve.models.blocks.norm import norm
from jaxserve.models.specs import DenseSpec
from jaxserve.models.weight import PlainWeight


class PoolHead(nnx.Module):
    def __init__(self, layers: Sequence[DenseSpec], declare: Declare) -> None:
        declare = dataclasses.replace(declare, dtype=np.dtype(np.float32))
        self.layers = nnx.List([Dense(spec, declare) for spec in layers])

    def __call__(self, vectors: jax.Array) -> jax.Array:
        """float32 [L, what the pooling gives] -> float32 [L, size]."""
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors


class Dense(nnx.Module):
    def __init__(self, spec: DenseSpec, declare: Declare) -> None:
        self.spec = spec
        self.weight = _matrix(spec, declare)
        self.bias = declare.vector(f"{spec.name}.bias", spec.size_out, "pooled") if spec.bias else None
        name = f"{spec.norm_name}.weight"
        self.norm = None if spec.norm is None else declare.norm(name, spec.norm, spec.size_out, "pooled")

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.dot(x, self.weight.get_value().matrix, precision=jax.lax.Precision.HIGHEST)
        if self.bias is not None:
            x = x + self.bias[...]
        if self.spec.act is not None:
            x = _activation(self.spec.act)(x)
        return x if self.spec.norm is None else norm(x, self.norm, self.spec.norm)


def _matrix(spec: DenseSpec, declare: Declare) -> nnx.Param[PlainWeight]:
    """[in, out], never quantized."""
    source = Source((f"{spec.name}.weight",), ((spec.size_out, spec.size_in),), (Rows(0, 0, spec.size_out),), transposed=True)
    shape, std = (spec.size_in, spec.size_out), spec.size_in**-0.5
    return nnx.Param(PlainWeight(ArrayInfo(shape, declare.dtype, ("pooled", "pooled"), source, std=std)))


def _activation(name: str) -> Callable[[jax.Array], jax.Array]:
    if name == "tanh":
        return jnp.tanh
    return jax.nn.sigmoid if name == "sigmoid" else activation(name)
