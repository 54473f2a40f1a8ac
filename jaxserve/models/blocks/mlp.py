"""The dense MLP.

gate and up are one matrix, in the order of the shards: a shard's columns of gate, then the same columns of up. One matmul reads
x once for both, and a shard finds them in its two halves.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.arrays import Rows
from jaxserve.models.blocks.declare import Declare
from jaxserve.models.blocks.shards import sum_shards
from jaxserve.models.context import StepContext
from jaxserve.models.specs import DenseMLPSpec
from jaxserve.models.weight import linear


class DenseMLP(nnx.Module):
    def __init__(self, spec: DenseMLPSpec, declare: Declare, prefix: str) -> None:
        self.act = spec.act
        size, part = spec.intermediate_size, spec.intermediate_size // declare.tp_size
        rows = [Rows(which, shard * part, part) for shard in range(declare.tp_size) for which in (0, 1)]
        weights, biases = ({f"{prefix}.{name}_proj.{kind}": size for name in ("gate", "up")} for kind in ("weight", "bias"))
        self.gate_up = declare.fused_matrix(weights, rows, "gate_up")
        self.gate_up_bias = declare.fused_bias(biases, rows, "gate_up") if spec.bias else None
        self.down = declare.matrix(f"{prefix}.down_proj.weight", size, "mlp")
        self.down_bias = declare.vector(f"{prefix}.down_proj.bias", declare.hidden_size, "hidden") if spec.bias else None

    def __call__(self, x: jax.Array, context: StepContext) -> jax.Array:
        """x [T, hidden] -> [T, hidden]."""
        gate, up = jnp.split(linear(x, self.gate_up, self.gate_up_bias), 2, axis=-1)
        return sum_shards(linear(activation(self.act)(gate) * up, self.down), self.down_bias)


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The function behind config.json's hidden_act."""
    if name == "silu":
        return jax.nn.silu
    if name == "relu":
        return jax.nn.relu
    assert name in ("gelu", "gelu_pytorch_tanh", "gelu_new"), name
    return lambda x: jax.nn.gelu(x, approximate=name != "gelu")
