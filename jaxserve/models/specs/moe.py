"""Mixtures of experts."""

from __future__ import annotations

import dataclasses

from jaxserve.models.specs.checks import check_activation, check_divides, check_sizes
from jaxserve.models.specs.mlp import DenseMLPSpec

SCORINGS = ("softmax", "sigmoid", "sparsemixer")
GROUP_SCORES = ("max", "top2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """Which experts a token goes to and what their answers weigh.

    Experts are chosen by their scores; a softmax over the chosen ones alone is `softmax` that `normalizes`.
    """

    scoring: str = "softmax"
    normalizes: bool = False  # the chosen experts' scores are divided by their sum, or by `least_sum` if that is more
    least_sum: float = 0.0
    scaling: float = 1.0  # what weights are multiplied with in the end
    bias: bool = False
    corrects_choice: bool = False  # a learned vector is added to the scores for choosing; weights are without
    num_groups: int = 1  # experts fall into as many groups, of which the best `chosen_groups` take part
    chosen_groups: int = 1
    group_score: str = "max"  # of a group: its best expert's score, or the sum of its two best
    in_float32: bool = False  # weights are float32 in models of other types, too
    jitter: float = 0.01  # sparsemixer: half of how far, as a ratio, a score may lie below the best to share in its softmax

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise ValueError(f"the router's scoring function must be one of {', '.join(SCORINGS)}; got {self.scoring!r}.")
        assert self.group_score in GROUP_SCORES, self.group_score
        if self.chosen_groups > self.num_groups:
            raise ValueError(f"topk_group={self.chosen_groups} must not exceed n_group={self.num_groups}.")

    @property
    def limits_groups(self) -> bool:
        return self.chosen_groups < self.num_groups

    def check(self, num_experts: int, experts_per_token: int) -> None:
        """ValueError unless that many of so many experts can be chosen."""
        if experts_per_token > num_experts:
            raise ValueError(f"num_experts_per_tok={experts_per_token} must not exceed num_experts={num_experts}.")
        if self.scoring == "sparsemixer" and experts_per_token != 2:
            raise ValueError(f"num_experts_per_tok must be 2 for routing by sparsemixer, got {experts_per_token}.")
        if num_experts % self.num_groups:
            raise ValueError(f"n_group={self.num_groups} must divide num_experts={num_experts}.")
        size = num_experts // self.num_groups
        if self.limits_groups and size * self.chosen_groups < experts_per_token:
            raise ValueError(
                f"num_experts_per_tok={experts_per_token} must not exceed the {size * self.chosen_groups} experts of "
                f"topk_group={self.chosen_groups} groups."
            )
        if self.limits_groups and self.group_score == "top2" and size < 2:
            raise ValueError(f"n_group={self.num_groups} must leave at least 2 of num_experts={num_experts} in a group.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(alpha * gate), of a gate of at most `limit` and an up within it."""

    alpha: float
    limit: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A router sends each token to some experts, each of them a dense MLP, and weighs what they answer."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    act: str = "silu"
    swiglu: ClampedSwiglu | None = None  # in place of act(gate) * up
    bias: bool = False
    router: RouterSpec = dataclasses.field(default_factory=RouterSpec)
    shared: DenseMLPSpec | None = None  # what all tokens go through besides
    gates_shared: bool = False  # what it answers is multiplied with a sigmoid of the token's own
    weighs_inputs: bool = False  # weights are multiplied with what experts read, not with what they answer

    def __post_init__(self) -> None:
        check_sizes(self, "num_experts", "experts_per_token", "intermediate_size")
        check_activation(self.act)
        self.router.check(self.num_experts, self.experts_per_token)

    def check_tp(self, tp_size: int) -> None:
        """ValueError with both numbers if what all tokens go through cannot be split over `tp_size` devices."""
        if self.shared is not None:
            check_divides("size of shared experts", self.shared.intermediate_size, tp_size)
