"""The decoder: hidden states of embedded tokens, and logits of them. One module for every family of `families`.

`DecoderModel` is the flax.nnx module. `Decoder` is its functional face for the jitted step: a static value (graph definition
and config) whose methods take the weights as a plain tree of arrays. The module is put together from both while JAX traces,
so a running step pays nothing for it. Must run inside a `jax.shard_map` over the mesh axis "tensor" (see `blocks`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.blocks.attention import Attend
from jaxserve.models.blocks.declare import Declare
from jaxserve.models.blocks.embedding import declare_embedding, declare_lm_head, embed, logits, tied_lm_head
from jaxserve.models.blocks.layer import DecoderLayer
from jaxserve.models.blocks.norm import norm
from jaxserve.models.config import ModelConfig
from jaxserve.models.context import StepContext
from jaxserve.models.specs import LayerSpec, index_in_kv_group

ParamTree = dict[str, Any]


class DecoderModel(nnx.Module):
    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        self.config = config
        self.embed = declare_embedding(declare, config.vocab_size)
        self.layers = nnx.List(
            [DecoderLayer(layer, declare, f"model.layers.{index}") for index, layer in enumerate(config.layers)]
        )
        self.final_norm = declare.norm("model.norm.weight", config.final_norm)
        self.lm_head = None if config.tie_word_embeddings else declare_lm_head(declare, config.vocab_size)

    def embed_tokens(self, token_ids: jax.Array) -> jax.Array:
        with jax.named_scope("embed"):
            return embed(self.embed, token_ids, self.config.embedding_scale)

    def __call__(self, x: jax.Array, context: StepContext, kv: Any, attend: Attend) -> tuple[jax.Array, Any]:
        # Layers of equal specs differ in their weights only, so one is traced and the others reuse it: a jitted function that
        # is called again with arguments of the same types is not traced again. XLA inlines the calls.
        specs = self.config.layers
        bodies: dict[LayerSpec, Any] = {}
        for index, (layer, spec) in enumerate(zip(self.layers, specs, strict=True)):
            graphdef, weights = nnx.split(layer)
            if spec not in bodies:
                bodies[spec] = _jitted_layer(graphdef, spec, context, attend)
            x, kv = bodies[spec](weights, x, kv, jnp.int32(index_in_kv_group(specs, index)))
        with jax.named_scope("final_norm"):
            return norm(x, self.final_norm, self.config.final_norm), kv

    def logits(self, hidden: jax.Array) -> jax.Array:
        with jax.named_scope("lm_head"):
            lm_head = tied_lm_head(self.embed) if self.lm_head is None else self.lm_head.get_value()
            return logits(lm_head, hidden, self.config.vocab_size, self.config.logit_soft_cap)


def _jitted_layer(graphdef: Any, spec: LayerSpec, context: StepContext, attend: Attend) -> Any:
    def layer(weights: Any, x: jax.Array, kv: Any, index: jax.Array) -> tuple[jax.Array, Any]:
        def bound(qkv: jax.Array, rotary: Any, sinks: jax.Array | None) -> tuple[jax.Array, Any]:
            return attend(qkv, rotary, kv, spec.attention, index, sinks)

        return nnx.merge(graphdef, weights)(x, context, bound)

    return jax.jit(layer)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The model as pure functions of its weights. Hashable by identity of its graph: make one and keep it."""

    config: ModelConfig
    graphdef: Any

    def embed(self, params: ParamTree, token_ids: jax.Array) -> jax.Array:
        """int32 [T] -> [T, hidden_size]."""
        return self._model(params).embed_tokens(token_ids)

    def context(self, positions: jax.Array) -> StepContext:
        """What `forward` needs to know of a step: positions int32 [T]."""
        return StepContext.of(positions, self.config.layers, self.config.max_position_embeddings)

    def forward(self, params: ParamTree, x: jax.Array, context: StepContext, kv: Any, attend: Attend) -> tuple[jax.Array, Any]:
        """Embedded tokens [T, hidden_size] -> (hidden states after the final norm [T, hidden_size], kv)."""
        return self._model(params)(x, context, kv, attend)

    def logits(self, params: ParamTree, hidden: jax.Array) -> jax.Array:
        """hidden [R, hidden_size] -> float32 [R, vocab_size], whole on every shard."""
        return self._model(params).logits(hidden)

    def _model(self, params: ParamTree) -> DecoderModel:
        return nnx.merge(self.graphdef, {**params, "layers": dict(enumerate(params["layers"]))})


def build_decoder(config: ModelConfig, tp_size: int) -> Decoder:
    """The decoder for weights of `abstract_params(config, dtype, tp_size)`."""
    graphdef, _ = nnx.split(_declared(config, jnp.float32, tp_size))  # the graph does not depend on the type
    return Decoder(config, graphdef)


def abstract_params(config: ModelConfig, dtype: Any, tp_size: int) -> ParamTree:
    """The tree of ArrayInfo (global shapes): {embed, layers: [{attn_norm, attn, mlp_norm, mlp}], final_norm, lm_head?}.

    Matrices are a Weight of ArrayInfo. ValueError if the model cannot be split over `tp_size` devices.
    """
    tree = nnx.to_pure_dict(nnx.state(_declared(config, dtype, tp_size)))
    return {**tree, "layers": [tree["layers"][index] for index in range(config.num_layers)]}


def check_tp(config: ModelConfig, tp_size: int) -> None:
    """ValueError with both numbers if the model cannot be split over `tp_size` devices."""
    for layer in dict.fromkeys(config.layers):
        layer.check_tp(tp_size)


def _declared(config: ModelConfig, dtype: Any, tp_size: int) -> DecoderModel:
    check_tp(config, tp_size)
    return DecoderModel(config, Declare(config.hidden_size, np.dtype(dtype), tp_size))
