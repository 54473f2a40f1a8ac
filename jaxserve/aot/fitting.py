"""Whether a model's weights can fit at all, and where they would: from shapes alone, before anything is compiled."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxserve.aot.chips import ChipSpec
from jaxserve.aot.roofline import ModelShard, weight_bytes
from jaxserve.aot.targets import Target, known_targets
from jaxserve.kernels.spec import QUANTIZED_DTYPES
from jaxserve.models import ModelConfig, check_tp

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Demand:
    """What is to fit: a model, and one request of `context_len` tokens, in `mem_fraction` of the memory."""

    config: ModelConfig
    dtype: str
    kv_dtype: str
    context_len: int
    mem_fraction: float
    row_table_bytes: int  # on each device

    def weight_bytes(self, tp_size: int) -> int:
        """On each device."""
        return weight_bytes(self.config, self.dtype, tp_size)

    def request_bytes(self, tp_size: int) -> int:
        """KV cache and states of one request of full length, on each device; without the padding of pages."""
        cfg = self.config
        heads = max(cfg.num_kv_heads // (tp_size // cfg.attn_dp_size), 1)
        scales = 2 * 4 if self.kv_dtype in QUANTIZED_DTYPES else 0
        vectors = 2 if cfg.latent_dim is None else 1  # a latent is key and value
        per_head = vectors * cfg.head_dim * jnp.dtype(self.kv_dtype).itemsize + scales
        tokens = sum(min(window or self.context_len, self.context_len) for window in cfg.windows)
        return tokens * heads * per_head + ModelShard(cfg, self.dtype, tp_size, 0).state_bytes

    def budget(self, chip: ChipSpec) -> int:
        return int(chip.hbm_bytes * self.mem_fraction)

    def fits(self, target: Target, tp_size: int) -> bool:
        try:
            check_tp(self.config, tp_size)
        except ValueError:
            return False
        return self.weight_bytes(tp_size) + self.row_table_bytes + self.request_bytes(tp_size) <= self.budget(target.chip)


def smallest_fit(demand: Demand, chip: ChipSpec | None = None) -> Target | None:
    """The known slice of fewest devices (of this chip, or of any) all of whose devices together hold the demand."""
    fitting = [target for target in known_targets() if chip in (None, target.chip) and demand.fits(target, target.num_devices)]
    return min(fitting, key=lambda target: target.num_devices, default=None)


def weights_too_large(demand: Demand, target: Target, tp_size: int) -> str | None:
    """A sentence if the weights alone do not fit, with by how much and what would hold them; else None."""
    weights, budget = demand.weight_bytes(tp_size), demand.budget(target.chip)
    if weights < budget:
        return None
    return (
        f"The weights take {weights / GIB:.1f} GiB of each {target.chip.name} device with --tp-size {tp_size}, and "
        f"{budget / GIB:.1f} GiB may be used (--mem-fraction-static {demand.mem_fraction:g} of "
        f"{target.chip.hbm_bytes / GIB:.1f}): {(weights - budget) / GIB:.1f} GiB too much. {suggestion(demand, target.chip)}"
    )


def suggestion(demand: Demand, chip: ChipSpec) -> str:
    """A sentence that names the smallest slice that would do."""
    found = smallest_fit(demand, chip)
    where = f"{chip.name} slice"
    if found is None:
        found, where = smallest_fit(demand), "known slice"
    if found is None:
        return "No known slice holds them and one request of full length."
    return (
        f"The smallest {where} that holds them and one request of {demand.context_len} tokens is {found.name} with "
        f"--tp-size {found.num_devices}."
    )
