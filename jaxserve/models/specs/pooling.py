"""What is made of a text's hidden states: one vector, or one for each token."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from jaxserve.models.specs.checks import check_activation, check_sizes
from jaxserve.models.specs.norm import NormSpec

# sentence-transformers' words: of a text's tokens the first or the last one's state, their mean, their sum over the square root
# of their number, the largest of each component, and the mean with weights that rise with the position. tokens: each one's own.
POOLINGS = ("cls", "last", "mean", "mean_sqrt_len", "max", "weighted_mean", "tokens")

# What the vectors are: embedding: of the text, for comparing; scores: a number for each label; token_scores: so of each token.
Gives: TypeAlias = Literal["embedding", "scores", "token_scores"]

# What scores become where a probability is wanted.
Activation: TypeAlias = Literal["sigmoid", "softmax", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """A matrix behind the pooling."""

    name: str  # of its tensors in checkpoints, without .weight and .bias
    size_in: int
    size_out: int
    bias: bool = True
    act: str | None = None  # one of ACTIVATIONS, or tanh or sigmoid; None: none
    norm: NormSpec | None = None  # behind the activation
    norm_name: str = ""

    def __post_init__(self) -> None:
        check_sizes(self, "size_in", "size_out")
        if self.act not in (None, "tanh", "sigmoid"):
            check_activation(str(self.act))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingSpec:
    """How a model makes vectors of texts."""

    kinds: tuple[str, ...] = ("last",)  # some of POOLINGS; what several give is joined in their order
    layers: tuple[DenseSpec, ...] = ()
    gives: Gives = "embedding"
    normalizes: bool = False  # an embedding's length is 1
    labels: tuple[str, ...] = ()  # of scores
    activation: Activation = "none"

    def __post_init__(self) -> None:
        for kind in self.kinds:
            assert kind in POOLINGS, kind
        assert "tokens" not in self.kinds or len(self.kinds) == 1, self.kinds

    @property
    def of_tokens(self) -> bool:
        """Each token has a vector of its own."""
        return self.kinds == ("tokens",)

    @property
    def needs_whole(self) -> bool:
        """All tokens of a text are needed, not only its last one."""
        return self.kinds != ("last",)

    def size(self, hidden_size: int) -> int:
        """Of a vector."""
        return self.layers[-1].size_out if self.layers else len(self.kinds) * hidden_size
