"""Runs the decoder without a paged cache: plain attention over one whole sequence, to compare with Transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from checkpoints import load_model
from jax.sharding import Mesh, PartitionSpec

from jaxserve.kernels.rotary import split_and_rotate
from jaxserve.kernels.state_rows import StateRows
from jaxserve.models import ModelConfig, abstract_params, build_decoder, load_params
from jaxserve.models.blocks.attend import Inputs, LatentInputs, Mixer, StateInputs
from jaxserve.models.blocks.state_inputs import state_arrays
from jaxserve.models.specs import StateMixer


def mesh_of(tp_size: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:tp_size]).reshape(1, tp_size), ("data", "tensor"))


def dense_attend(inputs: Inputs, kv: Any, layer: Mixer, index: jax.Array) -> tuple[jax.Array, Any]:
    """Causal attention of a sequence to itself; kv counts the layers it has seen."""
    if isinstance(inputs, StateInputs):
        assert isinstance(layer, StateMixer)
        return _from_nothing(inputs, layer), kv + 1
    assert not isinstance(layer, StateMixer)
    sinks = None
    if isinstance(inputs, LatentInputs):
        latents, rotated = jnp.split(inputs.rows, [layer.latent_dim], axis=1)
        k, v = (jnp.einsum("sl,hnl->shn", latents, matrices) for matrices in inputs.projections)
        rotated = jnp.broadcast_to(rotated[:, None], (*k.shape[:2], rotated.shape[1]))
        q, k = inputs.q, jnp.concatenate([k, rotated], axis=-1)
    else:
        sinks, (q, k, v) = inputs.sinks, split_and_rotate(inputs.qkv, inputs.rotary)
    group, num_tokens = q.shape[1] // k.shape[1], len(q)
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    scores = jnp.einsum("thd,shd->hts", q, k, preferred_element_type=jnp.float32) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * jnp.tanh(scores / layer.soft_cap)
    position = jnp.arange(num_tokens)
    visible = position[None] <= position[:, None]
    if layer.window is not None:
        first = position // layer.window * layer.window if layer.is_chunked else position - layer.window + 1
        visible &= position[None] >= first[:, None]
    scores = jnp.where(visible, scores, -jnp.inf)
    if sinks is not None:  # a key that all see, without a value
        sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1)).astype(scores.dtype)
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :num_tokens].astype(v.dtype)
    return jnp.einsum("hts,shd->thd", weights, v), kv + 1


def _from_nothing(inputs: StateInputs, layer: StateMixer) -> jax.Array:
    """A sequence whose states are zeros before its first token."""
    arrays = state_arrays(layer, jnp.float32, jax.lax.psum(1, "tensor"))
    states = {name: jnp.full((1, *array.shape), jnp.nan, array.dtype) for name, array in arrays.items()}
    num_tokens = inputs.num_tokens
    line = jnp.zeros(1, jnp.int32)
    rows = StateRows.in_chunks(
        sources=line,
        is_new=jnp.ones(1, bool),
        cu_q_lens=jnp.array([0, num_tokens]),
        row_index=jnp.zeros(num_tokens, jnp.int32),
        cuts=jnp.zeros((1, 0), jnp.int32),
        targets=line[:, None],
    )
    return inputs.update(states, rows)[0]


def logits_of(
    params: Any,
    config: ModelConfig,
    token_ids: Sequence[int],
    tp_size: int = 1,
    *,
    dtype: Any = jnp.float32,
) -> np.ndarray:
    """float32 [T, vocab] for one sequence, every position."""
    ids = np.asarray(token_ids, np.int32)
    logits, layers_seen = program_of(config, tp_size, dtype)(params, ids, np.arange(len(ids), dtype=np.int32))
    assert layers_seen == config.num_layers
    assert logits.dtype == jnp.float32
    return np.asarray(logits)


def program_of(config: ModelConfig, tp_size: int, dtype: Any = jnp.float32) -> Any:
    """Jitted: (params, ids int32 [T], positions int32 [T]) -> (logits, layers seen)."""
    decoder = build_decoder(config, tp_size)

    def run(params: Any, ids: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        context = decoder.context(positions)
        x = decoder.embed(params, ids, context)
        out = decoder.forward(params, x, context, jnp.int32(0), dense_attend)
        return decoder.logits(params, out.hidden), out.kv

    arrays = abstract_params(config, dtype, tp_size)
    specs = (jax.tree.map(lambda info: info.spec, arrays), PartitionSpec(), PartitionSpec())
    return jax.jit(jax.shard_map(run, mesh=mesh_of(tp_size), in_specs=specs, out_specs=PartitionSpec(), check_vma=False))


def folder_logits(
    folder: Path,
    token_ids: Sequence[int],
    tp_size: int = 1,
    *,
    dtype: Any = jnp.float32,
    load_format: str = "auto",
    **changes: Any,
) -> np.ndarray:
    """The same for a checkpoint folder; `changes` to the config."""
    config = ModelConfig.from_pretrained(folder).replace(**changes).for_context(len(token_ids))
    params = load_params(folder, config, mesh_of(tp_size), dtype, load_format, progress=False)
    return logits_of(params, config, token_ids, tp_size, dtype=dtype)


def oracle_logits(folder: Path, token_ids: Sequence[int]) -> np.ndarray:
    """What Transformers answers, float32 [T, vocab]."""
    import torch

    with torch.no_grad():
        return load_model(folder)(torch.tensor([list(token_ids)])).logits[0].numpy()


def prompt(num_tokens: int, vocab_size: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, num_tokens).tolist()
