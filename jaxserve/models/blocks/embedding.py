"""From token ids to hidden states, and from hidden states to logits. Both tables are sharded over the vocabulary.

The vocabulary is padded with zero rows to a multiple of the devices. Tables of positions and of types of tokens are small:
every device has them whole.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.adapters.low_rank import StepAdapters
from jaxserve.models.arrays import ALL_AXES, ArrayInfo, Rows, Source
from jaxserve.models.blocks.declare import Declare
from jaxserve.models.blocks.norm import norm
from jaxserve.models.exchange import Exchange
from jaxserve.models.native_weight import TiedNativeWeight
from jaxserve.models.specs import EmbeddingSpec
from jaxserve.models.weight import PlainWeight, Weight


def declare_embedding(declare: Declare, vocab_size: int) -> nnx.Param[Any]:
    """[padded vocabulary, hidden]."""
    return nnx.Param(_vocab_rows(declare, "model.embed_tokens.weight", vocab_size, transposed=False))


class EmbeddingSum(nnx.Module):
    """What is added to embedded tokens, and the norm of the sum."""

    def __init__(self, spec: EmbeddingSpec, declare: Declare) -> None:
        self.spec = spec
        skipped, types = spec.position_offset, spec.token_types
        self.positions = _table(declare, "model.embed_positions.weight", spec.num_positions, skipped)  # row p is position p's
        self.types = _table(declare, "model.embed_types.weight", types)
        self.norm = declare.norm("model.embed_norm.weight", spec.norm) if spec.norm is not None else None

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Embedded tokens with what their types add [T, hidden], their positions int32 [T] -> [T, hidden]."""
        if self.positions is not None:
            x = x + self.positions[...].at[positions].get(mode="clip")
        return x if self.spec.norm is None else norm(x, self.norm, self.spec.norm)


def declare_lm_head(declare: Declare, vocab_size: int, *, unit_rows: bool = False) -> nnx.Param[Any]:
    """[hidden, padded vocabulary], a Weight. `unit_rows`: the checkpoint's rows count by their direction alone."""
    return nnx.Param(declare.weight(_vocab_rows(declare, "lm_head.weight", vocab_size, transposed=True, unit_rows=unit_rows)))


def declare_lm_head_bias(declare: Declare, vocab_size: int) -> nnx.Param[Any]:
    """[padded vocabulary]."""
    source = Source(("lm_head.bias",), ((vocab_size,),), _padded(declare, vocab_size), transposed=False)
    return nnx.Param(ArrayInfo((_padded_size(declare, vocab_size),), declare.dtype, ("vocab",), source, std=0.02))


def embed(
    table: Any,
    token_ids: jax.Array,
    scale: float,
    exchange: Exchange,
    adapters: StepAdapters | None = None,
    *,
    types: Any = None,
    vocab_size: int,
) -> jax.Array:
    """Rows of the device's part [V / devices, hidden] for the ids of all shards, int32 [A], times scale -> [T, hidden] of this
    shard's: each device gives its own rows, the sum is whole. `types` is the table [types, hidden] of what is added to them, if
    ids tell types (`EmbeddingSpec`)."""
    weight = table[...]
    of_types: jax.Array | None = None
    if types is not None:
        assert scale == 1.0, scale
        of_types = types[...].at[jnp.maximum(token_ids // vocab_size, 0)].get(mode="clip")
        token_ids = token_ids % vocab_size

    def rows(indices: jax.Array) -> jax.Array:
        found = weight.at[indices].get(mode="clip")
        if adapters is not None:
            found = (found + adapters.rows(indices)).astype(found.dtype)
        return found if of_types is None else found + of_types

    if jax.lax.axis_size(ALL_AXES) == 1:
        x = rows(token_ids)
    else:
        local = token_ids - jax.lax.axis_index(ALL_AXES) * len(weight)
        is_mine = (local >= 0) & (local < len(weight))
        x = exchange.sum_own(jnp.where(is_mine[:, None], rows(local), 0))
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


def tied_lm_head(table: Any, *, native: bool) -> Weight:
    """The embedding as an output head."""
    rows = table[...]
    return TiedNativeWeight(rows.T, rows) if native else PlainWeight(rows.T)


def logits(
    lm_head: Weight, bias: Any, hidden: jax.Array, vocab_size: int, *, scale: float, soft_cap: float | None
) -> jax.Array:
    """hidden [R, hidden] -> float32 [R, vocab_size], whole on every shard. `bias` is a parameter or None."""
    local = lm_head.project(hidden, jnp.float32)
    if bias is not None:
        local = local + bias[...].astype(jnp.float32)
    if scale != 1.0:
        local = local * scale
    if soft_cap is not None:
        local = soft_cap * jnp.tanh(local / soft_cap)
    return jax.lax.all_gather(local, ALL_AXES, axis=1, tiled=True)[:, :vocab_size]


def _vocab_rows(declare: Declare, name: str, vocab_size: int, *, transposed: bool, unit_rows: bool = False) -> ArrayInfo:
    hidden = declare.hidden_size
    source = Source((name,), ((vocab_size, hidden),), _padded(declare, vocab_size), transposed, unit_rows=unit_rows)
    shape, axes = (_padded_size(declare, vocab_size), hidden), ("vocab", "hidden")
    if transposed:
        shape, axes = (shape[1], shape[0]), (axes[1], axes[0])
    return ArrayInfo(shape, declare.dtype, axes, source, std=hidden**-0.5)


def _table(declare: Declare, name: str, num_rows: int, skipped: int = 0) -> nnx.Param[Any] | None:
    """[num_rows - skipped, hidden], without the checkpoint's first rows; None without rows."""
    if num_rows == 0:
        return None
    hidden, count = declare.hidden_size, num_rows - skipped
    source = Source((name,), ((num_rows, hidden),), (Rows(0, skipped, count),), transposed=False)
    return nnx.Param(ArrayInfo((count, hidden), declare.dtype, ("rows", "hidden"), source, std=hidden**-0.5))


def _padded_size(declare: Declare, vocab_size: int) -> int:
    return vocab_size + -vocab_size % declare.tp_size


def _padded(declare: Declare, vocab_size: int) -> tuple[Rows, ...]:
    padding = _padded_size(declare, vocab_size) - vocab_size
    return (Rows(0, 0, vocab_size), *([Rows(None, 0, padding)] if padding else []))
