"""The decoder's building blocks as flax.nnx modules, for one shard of a `jax.shard_map` over the mesh axis "tensor".

Shapes in here are local: a shard holds some of the heads, of the MLP's columns and of the vocabulary, and how many it learns
from its weights. Each block ends with the collective that makes its output whole again. What a token attends to is not known
here: `attend` rotates q and k, writes k and v into the cache and answers.

T tokens, H local query heads, K local key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.kernels.rotary import Rotary, rms_norm
from jaxserve.models.config import ModelConfig
from jaxserve.models.params import TENSOR_AXIS, ArrayInfo, ParamTree

# attend(qkv [T, K, H / K + 2, D], rotary, kv, layer_index, window) -> (out [T, H, D], kv)
Attend: TypeAlias = Callable[[jax.Array, Rotary, Any, Any, Any], tuple[jax.Array, Any]]
CosSin: TypeAlias = tuple[jax.Array, jax.Array]


def declare(info: ArrayInfo) -> nnx.Param[Any]:
    """A parameter that has a shape but no value yet."""
    return nnx.Param(jax.ShapeDtypeStruct(info.shape, info.dtype))


def declare_optional(info: ArrayInfo | None) -> nnx.Param[Any] | None:
    """The same, or None for an array the model does not have."""
    return None if info is None else declare(info)


def linear(x: jax.Array, weight: Any, bias: Any = None, *, out_dtype: Any = None) -> jax.Array:
    """x [T, in] @ weight [in, out] (+ bias). Sums are float32; a float32 model is computed in full float32 on any device."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.dot(x, weight[...], precision=precision, preferred_element_type=out_dtype or x.dtype)
    return out if bias is None else out + bias[...]


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The function behind config.json's hidden_act."""
    if name == "silu":
        return jax.nn.silu
    if name == "relu":
        return jax.nn.relu
    assert name in ("gelu", "gelu_pytorch_tanh", "gelu_new"), name
    return lambda x: jax.nn.gelu(x, approximate=name != "gelu")


def sum_shards(x: jax.Array, bias: Any = None) -> jax.Array:
    """Adds up the shards' partial results, and the bias once."""
    whole = jax.lax.psum(x, TENSOR_AXIS)
    return whole if bias is None else whole + bias[...]


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, arrays: ParamTree) -> None:
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.qkv = declare(arrays["qkv"])
        self.qkv_bias = declare_optional(arrays.get("qkv_bias"))
        self.q_norm = declare_optional(arrays.get("q_norm"))
        self.k_norm = declare_optional(arrays.get("k_norm"))
        self.o = declare(arrays["o"])
        self.o_bias = declare_optional(arrays.get("o_bias"))

    def __call__(self, x: jax.Array, cos_sin: CosSin, attend: Callable[..., tuple[jax.Array, Any]]) -> tuple[jax.Array, Any]:
        """x [T, hidden] -> ([T, hidden], kv). `attend(qkv, rotary)` is bound to this layer and its cache."""
        num_tokens, q_heads = len(x), self.o.shape[0] // self.head_dim
        kv_heads = (self.qkv.shape[1] // self.head_dim - q_heads) // 2
        qkv = linear(x, self.qkv, self.qkv_bias)
        qkv = qkv.reshape(num_tokens, kv_heads, q_heads // kv_heads + 2, self.head_dim)
        rotary = Rotary(*cos_sin, q_norm=_value(self.q_norm), k_norm=_value(self.k_norm), eps=self.eps)
        with jax.named_scope("attend"):
            out, kv = attend(qkv, rotary)
        return sum_shards(linear(out.reshape(num_tokens, -1), self.o), self.o_bias), kv


def _value(param: nnx.Param[Any] | None) -> jax.Array | None:
    return None if param is None else param[...]


class MLP(nnx.Module):
    def __init__(self, config: ModelConfig, arrays: ParamTree) -> None:
        self.act = config.hidden_act
        self.gate_up, self.gate_up_bias = declare(arrays["gate_up"]), declare_optional(arrays.get("gate_up_bias"))
        self.down, self.down_bias = declare(arrays["down"]), declare_optional(arrays.get("down_bias"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, hidden] -> [T, hidden]."""
        gate, up = jnp.split(linear(x, self.gate_up, self.gate_up_bias), 2, axis=-1)
        return sum_shards(linear(activation(self.act)(gate) * up, self.down), self.down_bias)


class DecoderLayer(nnx.Module):
    def __init__(self, config: ModelConfig, arrays: ParamTree) -> None:
        self.eps = config.rms_norm_eps
        self.attn_norm = declare(arrays["attn_norm"])
        self.attn = Attention(config, arrays["attn"])
        self.mlp_norm = declare(arrays["mlp_norm"])
        self.mlp = MLP(config, arrays["mlp"])

    def __call__(self, x: jax.Array, cos_sin: CosSin, attend: Callable[..., tuple[jax.Array, Any]]) -> tuple[jax.Array, Any]:
        """x [T, hidden] -> ([T, hidden], kv)."""
        with jax.named_scope("attention"):
            out, kv = self.attn(rms_norm(x, self.attn_norm[...], self.eps), cos_sin, attend)
            x = x + out
        with jax.named_scope("mlp"):
            return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps)), kv


def embed(table: Any, token_ids: jax.Array) -> jax.Array:
    """Rows of a vocabulary-sharded table [V / shards, hidden] for ids int32 [T]: each shard gives its own, the sum is whole."""
    weight = table[...]
    if jax.lax.axis_size(TENSOR_AXIS) == 1:
        return weight.at[token_ids].get(mode="clip")
    local = token_ids - jax.lax.axis_index(TENSOR_AXIS) * len(weight)
    is_mine = (local >= 0) & (local < len(weight))
    return jax.lax.psum(jnp.where(is_mine[:, None], weight.at[local].get(mode="clip"), 0), TENSOR_AXIS)
