"""Mixers that keep a state per sequence, of one size however long it is, in place of keys and values per token.

A layer of them first runs a short convolution over the sequence, then a linear recurrence, of which each head keeps a matrix.
"""

from __future__ import annotations

import dataclasses

from jaxserve.models.specs.checks import check_activation, check_divides, check_sizes
from jaxserve.models.specs.norm import NormSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNetSpec:
    """Gated delta net (https://arxiv.org/abs/2412.06464): a head's matrix decays, and what it answers to the token's key is
    moved towards the token's value. Several value heads share a query and a key."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    conv_size: int  # tokens that the convolution sees, the newest included
    act: str = "silu"
    norm: NormSpec = dataclasses.field(default_factory=NormSpec)  # of each head's output

    def __post_init__(self) -> None:
        check_sizes(self, "num_key_heads", "num_value_heads", "key_dim", "value_dim")
        _check_conv(self.conv_size, self.act)
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads={self.num_value_heads} must be a multiple of "
                f"linear_num_key_heads={self.num_key_heads}."
            )

    @property
    def group_size(self) -> int:
        """Value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    def for_context(self, context_len: int) -> GatedDeltaNetSpec:
        return self

    def check_tp(self, tp_size: int) -> None:
        """ValueError with both numbers if the heads cannot be split over `tp_size` devices."""
        check_divides("linear_num_key_heads", self.num_key_heads, tp_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Spec:
    """Mamba 2 (https://arxiv.org/abs/2405.21060): a head's matrix decays, and the token's outer product of B and x is added; C
    reads it. Heads of a group share B and C."""

    num_heads: int
    head_dim: int
    state_dim: int  # of B and C
    num_groups: int
    conv_size: int  # tokens that the convolution sees, the newest included
    conv_bias: bool = True
    proj_bias: bool = False
    least_step: float = 0.0  # time steps are clamped
    most_step: float = float("inf")
    act: str = "silu"
    norm: NormSpec = dataclasses.field(default_factory=NormSpec)  # of each group's output

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "head_dim", "state_dim", "num_groups")
        _check_conv(self.conv_size, self.act)
        if self.num_heads % self.num_groups:
            raise ValueError(f"mamba_n_heads={self.num_heads} must be a multiple of mamba_n_groups={self.num_groups}.")

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    def for_context(self, context_len: int) -> Mamba2Spec:
        return self

    def check_tp(self, tp_size: int) -> None:
        """ValueError with both numbers if the heads cannot be split over `tp_size` devices."""
        check_divides("mamba_n_heads", self.num_heads, tp_size)
        if self.num_groups % tp_size and tp_size % self.num_groups:
            raise ValueError(
                f"--tp-size must divide the model's mamba_n_groups={self.num_groups} or be a multiple of it; got {tp_size}."
            )


def _check_conv(size: int, act: str) -> None:
    if size < 2:
        raise ValueError(f"the convolution must see at least 2 tokens, got {size}.")
    check_activation(act)
