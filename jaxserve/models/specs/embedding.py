"""What is added to embedded tokens before the first layer."""

from __future__ import annotations

import dataclasses

from jaxserve.models.specs.norm import NormSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingSpec:
    """Vectors learned for positions and for types of tokens, and a norm of the sum."""

    num_positions: int = 0  # rows of the checkpoint's table; 0: positions have no vectors
    position_offset: int = 0  # the row of position 0
    # Types of tokens, such as the first and the second of a pair of texts. A token of type t comes as its id plus t times the
    # vocabulary's size. 0: types have no vectors.
    token_types: int = 0
    norm: NormSpec | None = None
