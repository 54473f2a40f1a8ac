"""Norms."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A root-mean-square norm, or a layer norm, which subtracts the mean first."""

    eps: float = 1e-6
    counts_from_one: bool = False  # the factor is 1 + the checkpoint's weight, and the product is float32
    subtracts_mean: bool = False  # a layer norm; all of it is float32
    bias: bool = False  # of a layer norm: added at the end
    has_weight: bool = True  # of a root-mean-square norm: without, nothing is learned

    def __post_init__(self) -> None:
        assert self.subtracts_mean or not self.bias, self
        assert self.has_weight or not (self.subtracts_mean or self.counts_from_one), self
