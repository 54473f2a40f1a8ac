"""The decoder: hidden states of embedded tokens, and logits of them. One for every family of `families`.

`Decoder` is a static value, config and the graph definitions of flax.nnx modules, whose methods take the weights as a plain
tree of arrays. Modules are put together from both while JAX traces, so a running step pays nothing for it. Must run inside a
`jax.shard_map` over the mesh axes "data" and "tensor" (see `blocks`, `exchange`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.adapters.low_rank import AdaptedWeight, LowRank, StepAdapters, TokenSlots
from jaxserve.models.arrays import ALL_AXES
from jaxserve.models.blocks.attend import Attend, Inputs
from jaxserve.models.blocks.declare import Declare
from jaxserve.models.blocks.embedding import (
    EmbeddingSum,
    declare_embedding,
    declare_lm_head,
    declare_lm_head_bias,
    embed,
    logits,
    tied_lm_head,
)
from jaxserve.models.blocks.layer import DecoderLayer
from jaxserve.models.blocks.moe import Routed
from jaxserve.models.blocks.norm import norm
from jaxserve.models.blocks.pool_head import PoolHead
from jaxserve.models.config import ModelConfig
from jaxserve.models.context import OfAllShards, StepContext
from jaxserve.models.exchange import AllHere, Exchange
from jaxserve.models.specs import EmbeddingSpec, LayerSpec, MoESpec, check_divides
from jaxserve.models.stored_as import stored_as
from jaxserve.models.weight import in_float32, rounded_in_float32

ParamTree = dict[str, Any]


class DecoderOutput(NamedTuple):
    hidden: jax.Array  # [T, hidden_size]; behind the last layer after the final norm
    kv: Any
    expert_counts: jax.Array | None  # int32 [own layers with experts, experts]: tokens that went to each, if they are counted
    experts: jax.Array | None  # int32 [T, own layers with experts, K]: of each token, if they are told


class Ends(nnx.Module):
    """What stands before and behind the layers; in a stage of a pipeline what it computes with. What is tied is in both."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        is_last, is_tied, vocab_size = config.has_head, config.tie_word_embeddings, config.vocab_size
        has_head = config.makes_logits
        self.embed = declare_embedding(declare, vocab_size) if config.embeds or (has_head and is_tied) else None
        has_sum = config.embeds and config.embedding != EmbeddingSpec()
        self.embed_sum = EmbeddingSum(config.embedding, declare) if has_sum else None
        final_norm = config.final_norm if is_last else None
        self.final_norm = None if final_norm is None else declare.norm("model.norm.weight", final_norm)
        own_head, unit_rows = has_head and not is_tied, config.lm_head_has_unit_rows
        self.lm_head = declare_lm_head(declare, vocab_size, unit_rows=unit_rows) if own_head else None
        self.lm_head_bias = declare_lm_head_bias(declare, vocab_size) if has_head and config.lm_head_bias else None
        layers = config.pooling.layers if is_last and not config.generates else ()
        self.pool_head = PoolHead(layers, declare) if layers else None


def _jitted_layer(graphdef: Any, spec: LayerSpec, context: StepContext, attend: Attend) -> Any:
    def layer(weights: Any, x: jax.Array, kv: Any, index: jax.Array) -> tuple[jax.Array, Any, Routed]:
        def bound(inputs: Inputs) -> tuple[jax.Array, Any]:
            return attend(inputs, kv, spec.mixer, index)

        return nnx.merge(graphdef, weights)(x, context, bound)

    return jax.jit(layer)


def _own(known: jax.Array, exchange: Exchange) -> jax.Array:
    """Of what every device knows of the tokens of all shards, [A, ...], this shard's, [T, ...]."""
    if isinstance(exchange, AllHere):
        return known
    is_first = jax.lax.axis_index(ALL_AXES) == 0
    return exchange.sum_own(jnp.where(is_first, known, 0))


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The model as pure functions of its weights."""

    config: ModelConfig
    ends: Any  # graph definition of Ends
    layers: Mapping[LayerSpec, Any]  # of a DecoderLayer

    def embed(
        self, params: ParamTree, token_ids: jax.Array, context: StepContext, adapters: StepAdapters | None = None
    ) -> jax.Array:
        """int32 [A] of all shards -> [T, hidden_size] of this one's."""
        with jax.named_scope("embed"):
            ends, config, exchange = self._ends(params), self.config, context.of_all.exchange
            scale, types = config.embedding_scale, None if ends.embed_sum is None else ends.embed_sum.types
            x = embed(ends.embed, token_ids, scale, exchange, adapters, types=types, vocab_size=config.vocab_size)
            return x if ends.embed_sum is None else ends.embed_sum(x, context.positions)

    def context(
        self,
        positions: jax.Array,
        is_live: jax.Array | None = None,
        *,
        of_all: OfAllShards | None = None,
        counts_experts: bool = False,
        returns_experts: bool = False,
    ) -> StepContext:
        """What the other methods need to know of a step: positions int32 [T], which slots hold a token, bool [T], and those
        of all shards where each has its own."""
        attention, max_len = self.config.attention, self.config.max_position_embeddings
        told = {"counts_experts": counts_experts, "returns_experts": returns_experts}
        told["batch_invariant"] = self.config.batch_invariant
        return StepContext.of(positions, is_live, attention, max_len, of_all=of_all, **told)

    def forward(
        self,
        params: ParamTree,
        x: jax.Array,
        context: StepContext,
        kv: Any,
        attend: Attend,
        adapters: StepAdapters | None = None,
    ) -> DecoderOutput:
        """Of embedded tokens [T, hidden_size], or of what another stage made of them."""
        # Layers of equal specs differ in their weights only, so one is traced and the others reuse it: a jitted function that
        # is called again with arguments of the same types is not traced again. XLA inlines the calls.
        bodies = {spec: _jitted_layer(graphdef, spec, context, attend) for spec, graphdef in self.layers.items()}
        counts, experts = [], []
        for layer, index in zip(self.config.own_layers, self.config.kv_indices, strict=True):
            weights = params["layers"][layer]
            if adapters is not None:
                weights = adapters.adapt(layer, weights)
            x, kv, of_layer = bodies[self.config.layers[layer]](weights, x, kv, jnp.int32(index))
            counts += [] if of_layer.counts is None else [of_layer.counts]
            experts += [] if of_layer.experts is None else [of_layer.experts]
        if self.config.has_head and self.config.final_norm is not None:
            with jax.named_scope("final_norm"):
                x = norm(x, self._ends(params).final_norm, self.config.final_norm)
        own_experts = _own(jnp.stack(experts, axis=1), context.of_all.exchange) if experts else None
        return DecoderOutput(x, kv, jnp.stack(counts) if counts else None, own_experts)

    def logits(
        self, params: ParamTree, hidden: jax.Array, adapters: LowRank | None = None, slots: jax.Array | None = None
    ) -> jax.Array:
        """hidden [R, hidden_size], alike on all devices -> float32 [R, vocab_size], likewise. `adapters`: of the output head,
        with the rows' `slots`, int32 [R]."""
        with jax.named_scope("lm_head"):
            ends, config = self._ends(params), self.config
            if ends.lm_head is None:
                lm_head = tied_lm_head(ends.embed, native=config.native_products)
            else:
                lm_head = ends.lm_head.get_value()
            if config.fp32_lm_head:
                (lm_head, adapters), hidden = in_float32((lm_head, adapters)), rounded_in_float32(hidden)
            if adapters is not None:
                assert slots is not None
                lm_head = AdaptedWeight(lm_head, adapters, TokenSlots.of(slots, adapters))
            scale, soft_cap = config.logit_scale, config.logit_soft_cap
            return logits(lm_head, ends.lm_head_bias, hidden, config.vocab_size, scale=scale, soft_cap=soft_cap)

    def pool_head(self, params: ParamTree, vectors: jax.Array) -> jax.Array:
        """What the pooling gives, float32 [L, kinds * hidden_size], alike on all devices -> float32 [L, pooled_size]."""
        with jax.named_scope("pool_head"):
            head = self._ends(params).pool_head
            return vectors if head is None else head(vectors)

    def _ends(self, params: ParamTree) -> Ends:
        return nnx.merge(self.ends, {name: value for name, value in params.items() if name != "layers"})


def build_decoder(config: ModelConfig, tp_size: int) -> Decoder:
    """The decoder for weights of `abstract_params(config, dtype, tp_size)`."""
    declare = _declare(config, jnp.float32, tp_size)  # graphs do not depend on the type
    first = {config.layers[index]: index for index in reversed(config.own_layers)}
    layers = {spec: nnx.graphdef(DecoderLayer(spec, _at_layer(declare, config, at), "")) for spec, at in first.items()}
    return Decoder(config, nnx.graphdef(Ends(config, declare)), layers)


def abstract_params(config: ModelConfig, dtype: Any, tp_size: int) -> ParamTree:
    """The tree of ArrayInfo (global shapes): {embed, layers: {0: {attn_norm, attn, mlp_norm, mlp}}, final_norm,
    lm_head?, lm_head_bias?, pool_head?}; of a stage what it has of them.

    Matrices are a Weight of ArrayInfo. ValueError if the model cannot be split over `tp_size` devices.
    """
    declare = _declare(config, dtype, tp_size)
    layers = {
        index: _described(DecoderLayer(config.layers[index], _at_layer(declare, config, index), f"model.layers.{index}"))
        for index in config.own_layers
    }
    tree = {**_described(Ends(config, declare)), "layers": layers}
    pool_head = tree.pop("pool_head", None)  # has the checkpoint's names already
    tree = jax.tree.map(lambda info: stored_as(info, config.tensor_names), tree)
    return tree if pool_head is None else {**tree, "pool_head": pool_head}


def check_tp(config: ModelConfig, tp_size: int) -> None:
    """ValueError with both numbers if the model cannot be split over `tp_size` devices."""
    attn_dp_size = _attn_dp_size(config, tp_size)
    if tp_size % attn_dp_size:
        raise ValueError(f"--attn-dp-size must divide --tp-size {tp_size}; got {attn_dp_size}.")
    for layer in dict.fromkeys(config.layers):
        layer.check_tp(tp_size, attn_dp_size)
        if not isinstance(layer.mlp, MoESpec):
            continue
        if config.expert_placement is None or tp_size == 1:
            check_divides("num_experts", layer.mlp.num_experts, tp_size)
        else:
            config.expert_placement.check(layer.mlp, tp_size)


def _declare(config: ModelConfig, dtype: Any, tp_size: int) -> Declare:
    check_tp(config, tp_size)
    return Declare(
        config.hidden_size,
        np.dtype(dtype),
        tp_size,
        config.quantization,
        config.native_products,
        attn_dp_size=_attn_dp_size(config, tp_size),
    )


def _attn_dp_size(config: ModelConfig, tp_size: int) -> int:
    """On one device there is nothing to divide: that layout is the checkpoints' own."""
    return config.attn_dp_size if tp_size > 1 else 1


def _at_layer(declare: Declare, config: ModelConfig, index: int) -> Declare:
    """For the parameters of one layer. On one device there is nowhere to place experts: that layout is the checkpoints' own."""
    if config.expert_placement is None or declare.tp_size == 1 or index not in config.sparse_layers:
        return declare
    number = config.sparse_layers.index(index)
    slots = config.expert_placement.slots_of(number, config.num_experts, declare.tp_size)
    return dataclasses.replace(declare, expert_slots=slots)


def _described(module: nnx.Module) -> ParamTree:
    return dict(nnx.to_pure_dict(nnx.state(module)))
