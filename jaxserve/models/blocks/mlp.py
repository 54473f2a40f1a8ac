"""The dense MLP.

gate and up are one matrix, in the order of the shards: a shard's columns of gate, then the same columns of up. One matmul reads
x once for both, and a shard finds them in its two halves. Without a gate, up stands alone.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.arrays import Rows
from jaxserve.models.blocks.declare import Declare
from jaxserve.models.context import StepContext
from jaxserve.models.specs import DenseMLPSpec
from jaxserve.models.weight import linear


class DenseMLP(nnx.Module):
    def __init__(self, spec: DenseMLPSpec, declare: Declare, prefix: str) -> None:
        self.act = spec.act
        size, part = spec.intermediate_size, spec.intermediate_size // declare.tp_size
        names, axis = (("gate", "up"), "gate_up") if spec.is_gated else (("up",), "mlp")
        rows = [Rows(which, shard * part, part) for shard in range(declare.tp_size) for which in range(len(names))]
        weights, biases = ({f"{prefix}.{name}_proj.{kind}": size for name in names} for kind in ("weight", "bias"))
        weight, bias = declare.fused_matrix(weights, rows, axis), declare.fused_bias(biases, rows, axis) if spec.bias else None
        self.gate_up = weight if spec.is_gated else None
        self.gate_up_bias = bias if spec.is_gated else None
        self.up = None if spec.is_gated else weight
        self.up_bias = None if spec.is_gated else bias
        self.down = declare.matrix(f"{prefix}.down_proj.weight", size, "mlp")
        self.down_bias = declare.vector(f"{prefix}.down_proj.bias", declare.hidden_size, "hidden") if spec.bias else None

    def __call__(self, x: jax.Array, context: StepContext) -> jax.Array:
        """x [T, hidden] -> [T, hidden]."""
        exchange = context.of_all.exchange
        return exchange.sum_own(self.partial(exchange.gather(x)), self.down_bias)

    def partial(self, x: jax.Array) -> jax.Array:
        """What this shard adds to the result, without the bias."""
        if self.gate_up is None:
            inner = activation(self.act)(linear(x, self.up, self.up_bias))
        else:
            gate, up = jnp.split(linear(x, self.gate_up, self.gate_up_bias), 2, axis=-1)
            inner = activation(self.act)(gate) * up
        return linear(inner, self.down)


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The function behind config.json's hidden_act."""
    if name == "silu":
        return jax.nn.silu
    if name == "relu":
        return jax.nn.relu
    if name == "relu2":
        return lambda x: jnp.square(jax.nn.relu(x))
    assert name in ("gelu", "gelu_pytorch_tanh", "gelu_new"), name
    return lambda x: jax.nn.gelu(x, approximate=name != "gelu")
