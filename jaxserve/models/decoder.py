"""The decoder: token ids and positions in, hidden states and logits out. One module for every family of `registry`.

`DecoderModel` is the flax.nnx module. `Decoder` is its functional face for the jitted step: a static value (graph definition
and config) whose methods take the weights as a plain tree of arrays. The module is put together from both while JAX traces,
so a running step pays nothing for it. Must run inside a `jax.shard_map` over the mesh axis "tensor" (see `layers`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.kernels.rotary import rms_norm
from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import Attend, CosSin, DecoderLayer, declare, declare_optional, embed, linear
from jaxserve.models.params import TENSOR_AXIS, ParamTree, abstract_params
from jaxserve.models.rope import rope_cos_sin

# Window of a full-attention layer where windows differ by layer and are data: longer than any sequence.
_NO_WINDOW = 1 << 30


class DecoderModel(nnx.Module):
    """`layers` is a list of DecoderLayer, or one DecoderLayer whose weights have a leading layer axis."""

    def __init__(self, config: ModelConfig, arrays: ParamTree, *, scan_unroll: int) -> None:
        self.config = config
        self.scan_unroll = scan_unroll
        self.embed = declare(arrays["embed"])
        if isinstance(arrays["layers"], list):
            self.layers: Any = nnx.List([DecoderLayer(config, layer) for layer in arrays["layers"]])
        else:
            self.layers = DecoderLayer(config, arrays["layers"])
        self.final_norm = declare(arrays["final_norm"])
        self.lm_head = declare_optional(arrays.get("lm_head"))

    def __call__(self, token_ids: jax.Array, positions: jax.Array, kv: Any, attend: Attend) -> tuple[jax.Array, Any]:
        cfg = self.config
        with jax.named_scope("embed"):
            x = embed(self.embed, token_ids)
        with jax.named_scope("rope_tables"):
            cos_sin = rope_cos_sin(positions, cfg.rope, cfg.head_dim, cfg.max_position_embeddings)
        if isinstance(self.layers, DecoderLayer):
            x, kv = self._scan_layers(x, cos_sin, kv, attend)
        else:
            x, kv = self._each_layer(x, cos_sin, kv, attend)
        with jax.named_scope("final_norm"):
            return rms_norm(x, self.final_norm[...], cfg.rms_norm_eps), kv

    def _each_layer(self, x: jax.Array, cos_sin: CosSin, kv: Any, attend: Attend) -> tuple[jax.Array, Any]:
        # Layers differ in their weights only, so one is traced (per window) and the others reuse it: a jitted function that is
        # called again with arguments of the same types is not traced again. XLA inlines the calls.
        bodies: dict[int | None, Any] = {}
        for index, (layer, window) in enumerate(zip(self.layers, self.config.windows, strict=True)):
            graphdef, weights = nnx.split(layer)
            if window not in bodies:
                bodies[window] = _jitted_layer(graphdef, cos_sin, attend, window)
            x, kv = bodies[window](weights, x, kv, jnp.int32(index))
        return x, kv

    def _scan_layers(self, x: jax.Array, cos_sin: CosSin, kv: Any, attend: Attend) -> tuple[jax.Array, Any]:
        windows = self.config.windows
        mixed = len(set(windows)) > 1
        graphdef, weights = nnx.split(self.layers)

        def body(carry: tuple[jax.Array, Any], scanned: Any) -> tuple[tuple[jax.Array, Any], None]:
            x, kv = carry
            layer_weights, index, window = scanned
            with jax.named_scope("layer"):
                layer = nnx.merge(graphdef, layer_weights)
                return layer(x, cos_sin, _bind(attend, kv, index, window if mixed else windows[0])), None

        indices = jnp.arange(len(windows), dtype=jnp.int32)
        limits = jnp.asarray([window or _NO_WINDOW for window in windows], jnp.int32)
        (x, kv), _ = jax.lax.scan(body, (x, kv), (weights, indices, limits), unroll=self.scan_unroll)
        return x, kv

    def logits(self, hidden: jax.Array) -> jax.Array:
        with jax.named_scope("lm_head"):
            if self.lm_head is None:
                local = linear(hidden, self.embed[...].T, out_dtype=jnp.float32)
            else:
                local = linear(hidden, self.lm_head, out_dtype=jnp.float32)
            whole = jax.lax.all_gather(local, TENSOR_AXIS, axis=1, tiled=True)
            return whole[:, : self.config.vocab_size]


def _jitted_layer(graphdef: Any, cos_sin: CosSin, attend: Attend, window: int | None) -> Any:
    def layer(weights: Any, x: jax.Array, kv: Any, index: jax.Array) -> tuple[jax.Array, Any]:
        return nnx.merge(graphdef, weights)(x, cos_sin, _bind(attend, kv, index, window))

    return jax.jit(layer)


def _bind(attend: Attend, kv: Any, index: Any, window: Any) -> Any:
    return lambda qkv, rotary: attend(qkv, rotary, kv, index, window)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The model as pure functions of its weights. Hashable by identity of its graph: make one and keep it."""

    config: ModelConfig
    graphdef: Any

    @property
    def attention_scale(self) -> float:
        """What q·k is multiplied with before the softmax."""
        return float(self.config.head_dim**-0.5)

    def forward(
        self, params: ParamTree, token_ids: jax.Array, positions: jax.Array, kv: Any, attend: Attend
    ) -> tuple[jax.Array, Any]:
        """token_ids and positions int32 [T] -> (hidden states after the final norm [T, hidden_size], kv).

        `attend(qkv, rotary, kv, layer_index, window)` gets a KV head's queries, key and value as they were projected, and what
        norms and rotates them. layer_index is a traced int32 scalar;
        window is an int or None (no limit), or, with stacked layers of several windows, a traced int32 scalar too. It counts
        the visible tokens including the query's own. kv is any pytree; it is threaded through to be updated in place.
        """
        return self._model(params)(token_ids, positions, kv, attend)

    def logits(self, params: ParamTree, hidden: jax.Array) -> jax.Array:
        """hidden [R, hidden_size] -> float32 [R, vocab_size], whole on every shard."""
        return self._model(params).logits(hidden)

    def _model(self, params: ParamTree) -> DecoderModel:
        layers = params["layers"]
        return nnx.merge(self.graphdef, {**params, "layers": layers if isinstance(layers, dict) else dict(enumerate(layers))})


def build_decoder(config: ModelConfig, tp_size: int, *, stacked: bool = False, scan_unroll: int = 1) -> Decoder:
    """The decoder for weights of `abstract_params(config, dtype, tp_size, stacked=stacked)`.

    `stacked` runs the layers as one `lax.scan` (`scan_unroll` of them per iteration): compile time stays that of one layer,
    but see `params` for what it costs on CPU. Default: every layer is traced.
    """
    arrays = abstract_params(config, jnp.float32, tp_size, stacked=stacked)  # the graph does not depend on the type
    graphdef, _ = nnx.split(DecoderModel(config, arrays, scan_unroll=scan_unroll))
    return Decoder(config, graphdef)
