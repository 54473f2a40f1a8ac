"""StepContext: what all layers of a step share, made once per step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax

from jaxserve.models.exchange import AllHere, Exchange
from jaxserve.models.rope import rope_cos_sin
from jaxserve.models.rope_config import RopeConfig
from jaxserve.models.specs import AttentionMixer

CosSin: TypeAlias = tuple[jax.Array, jax.Array]


class OfAllShards(NamedTuple):
    """What MLPs, experts and the vocabulary work on: the tokens of all shards, in A slots."""

    exchange: Exchange  # from this shard's tokens to these, and back
    positions: jax.Array  # int32 [A]
    is_live: jax.Array | None  # bool [A]


@dataclasses.dataclass(frozen=True)
class StepContext:
    """Layers close over it while they are traced."""

    positions: jax.Array  # int32 [T], of this shard's tokens, as the next
    is_live: jax.Array | None  # bool [T]; False for slots without a token, None: all have one
    of_all: OfAllShards
    rope_tables: Mapping[tuple[RopeConfig, int], CosSin]  # per kind of rope and rope_dim: float32 [T, rope_dim / 2] each
    counts_experts: bool = False  # whether mixtures count their experts' tokens
    returns_experts: bool = False  # and tell each token's experts
    batch_invariant: bool = False  # what a token gets must not depend on the rest of the step

    @staticmethod
    def of(
        positions: jax.Array,
        is_live: jax.Array | None,
        attention: Sequence[AttentionMixer],
        max_position_embeddings: int,
        *,
        of_all: OfAllShards | None = None,
        counts_experts: bool = False,
        returns_experts: bool = False,
        batch_invariant: bool = False,
    ) -> StepContext:
        """`of_all`: None where every device has all tokens."""
        with jax.named_scope("rope_tables"):
            kinds = dict.fromkeys((mixer.rope, mixer.rope_dim) for mixer in attention)
            tables = {(rope, dim): rope_cos_sin(positions, rope, dim, max_position_embeddings) for rope, dim in kinds}
        of_all = of_all or OfAllShards(AllHere(in_order=batch_invariant), positions, is_live)
        return StepContext(positions, is_live, of_all, tables, counts_experts, returns_experts, batch_invariant)

    def cos_sin(self, attention: AttentionMixer) -> CosSin:
        return self.rope_tables[attention.rope, attention.rope_dim]
