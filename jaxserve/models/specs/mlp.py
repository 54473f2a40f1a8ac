"""Dense MLPs."""

from __future__ import annotations

import dataclasses

from jaxserve.models.specs.checks import check_activation, check_divides, check_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseMLPSpec:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    intermediate_size: int
    act: str = "silu"
    is_gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "intermediate_size")
        check_activation(self.act)

    def check_tp(self, tp_size: int) -> None:
        """ValueError with both numbers if the columns cannot be split over `tp_size` devices."""
        check_divides("intermediate_size", self.intermediate_size, tp_size)
