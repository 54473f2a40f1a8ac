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

    def __post_init__(self) -> None:
        if self.num_positions and not 0 <= self.position_offset < self.num_positions:
            raise ValueError(
                f"max_position_embeddings must be above the {self.position_offset} rows that no position has, "
                f"got {self.num_positions}."
            )

    def context_len(self, longest: int) -> int:
        """Most tokens in one sequence, of `longest` that the layers can take."""
        return min(longest, self.num_positions - self.position_offset) if self.num_positions else longest
