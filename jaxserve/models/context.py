"""StepContext: what all layers of a step share, made once per step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxserve.models.exchange import AllHere, Exchange
from jaxserve.models.rope import rope_cos_sin
from jaxserve.models.rope_config import RopeConfig
from jaxserve.models.specs import AttentionMixer

CosSin: TypeAlias = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class StepContext:
    """Layers close over it while they are traced."""

    positions: jax.Array  # int32 [T], of this shard's tokens, as the next
    is_live: jax.Array | None  # bool [T]; False for slots without a token, None: all have one
    exchange: Exchange  # from this shard's tokens to those of all, and back
    all_positions: jax.Array  # int32 [A], as `positions` of the tokens of all shards
    all_live: jax.Array | None  # bool [A]
    rope_tables: Mapping[tuple[RopeConfig, int], CosSin]  # per kind of rope and rope_dim: float32 [T, rope_dim / 2] each
    counts_experts: bool = False  # whether mixtures count their experts' tokens

    @staticmethod
    def of(
        positions: jax.Array,
        is_live: jax.Array | None,
        attention: Sequence[AttentionMixer],
        max_position_embeddings: int,
        *,
        exchange: Exchange | None = None,
        counts_experts: bool = False,
    ) -> StepContext:
        """`exchange`: None where every device has all tokens."""
        with jax.named_scope("rope_tables"):
            kinds = dict.fromkeys((mixer.rope, mixer.rope_dim) for mixer in attention)
            tables = {(rope, dim): rope_cos_sin(positions, rope, dim, max_position_embeddings) for rope, dim in kinds}
        if exchange is None:
            return StepContext(positions, is_live, AllHere(), positions, is_live, tables, counts_experts)
        own = positions + 1 if is_live is None else jnp.where(is_live, positions + 1, 0)
        lengths = exchange.gather(own)
        return StepContext(positions, is_live, exchange, lengths - 1, lengths > 0, tables, counts_experts)

    def cos_sin(self, attention: AttentionMixer) -> CosSin:
        return self.rope_tables[attention.rope, attention.rope_dim]
