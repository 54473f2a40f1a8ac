"""StepContext: what all layers of a step share, made once per step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax

from jaxserve.models.rope import rope_cos_sin
from jaxserve.models.rope_config import RopeConfig
from jaxserve.models.specs import AttentionMixer

CosSin: TypeAlias = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class StepContext:
    """Layers close over it while they are traced."""

    positions: jax.Array  # int32 [T]
    is_live: jax.Array | None  # bool [T]; False for slots without a token, None: all have one
    rope_tables: Mapping[tuple[RopeConfig, int], CosSin]  # per kind of rope and rope_dim: float32 [T, rope_dim / 2] each
    counts_experts: bool = False  # whether mixtures count their experts' tokens

    @staticmethod
    def of(
        positions: jax.Array,
        is_live: jax.Array | None,
        attention: Sequence[AttentionMixer],
        max_position_embeddings: int,
        *,
        counts_experts: bool = False,
    ) -> StepContext:
        with jax.named_scope("rope_tables"):
            kinds = dict.fromkeys((mixer.rope, mixer.rope_dim) for mixer in attention)
            tables = {(rope, dim): rope_cos_sin(positions, rope, dim, max_position_embeddings) for rope, dim in kinds}
        return StepContext(positions, is_live, tables, counts_experts)

    def cos_sin(self, attention: AttentionMixer) -> CosSin:
        return self.rope_tables[attention.rope, attention.rope_dim]
