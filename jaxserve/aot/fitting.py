"""Whether a model's weights can fit at all, and where they would: from shapes alone, before anything is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jaxserve.aot.chips import ChipSpec
from jaxserve.aot.roofline import ModelShard, weight_bytes
from jaxserve.aot.targets import Target, known_targets
from jaxserve.kernels.spec import QUANTIZED_DTYPES
from jaxserve.models import ModelConfig, check_tp, divide_layers

GIB = 1 << 30
_PP_SIZES = (2, 4, 8)  # that are suggested


@dataclasses.dataclass(frozen=True)
class Demand:
    """What is to fit: a model, and one request of `context_len` tokens, in `mem_fraction` of the memory."""

    config: ModelConfig
    dtype: str
    kv_dtype: str
    context_len: int
    mem_fraction: float
    row_table_bytes: int  # on each device
    dcp_size: int = 1  # devices that share latents by tokens

    def stages(self, pp_size: int = 1, partition: Sequence[int] | None = None) -> tuple[ModelConfig, ...]:
        """The model's parts. ValueError if it cannot be divided so."""
        stages = divide_layers(self.config.num_layers, pp_size, partition)
        return tuple(self.config.replace(stage=stage) for stage in stages)

    def weight_bytes(self, stage: ModelConfig, tp_size: int) -> int:
        """On each device of a stage."""
        return weight_bytes(stage, self.dtype, tp_size)

    def request_bytes(self, stage: ModelConfig, tp_size: int) -> int:
        """KV cache and states of one request of full length, on each device of a stage; without the padding of pages."""
        shard = ModelShard(stage, self.dtype, tp_size, 0)
        heads = max(stage.num_kv_heads // shard.attn_tp_size, 1)
        scales = 2 * 4 if self.kv_dtype in QUANTIZED_DTYPES else 0
        vectors = 2 if stage.latent_dim is None else 1  # a latent is key and value
        per_head = vectors * stage.head_dim * jnp.dtype(self.kv_dtype).itemsize + scales
        tokens = sum(min(window or self.context_len, self.context_len) for window in shard.windows)
        return tokens * heads * per_head // self.dcp_size + shard.state_bytes

    def budget(self, chip: ChipSpec) -> int:
        return int(chip.hbm_bytes * self.mem_fraction)

    def fits(self, chip: ChipSpec, tp_size: int, pp_size: int = 1) -> bool:
        try:
            check_tp(self.config, tp_size)
            stages = self.stages(pp_size)
        except ValueError:
            return False
        return all(
            self.weight_bytes(stage, tp_size) + stage.makes_logits * self.row_table_bytes + self.request_bytes(stage, tp_size)
            <= self.budget(chip)
            for stage in stages
        )


class Fit(NamedTuple):
    """Where a demand is met."""

    target: Target
    tp_size: int
    pp_size: int

    @property
    def options(self) -> str:
        stages = f"--pp-size {self.pp_size} " if self.pp_size > 1 else ""
        return f"{stages}--tp-size {self.tp_size}"


def smallest_fit(demand: Demand, chip: ChipSpec | None = None) -> Fit | None:
    """The known slice of fewest devices (of this chip, or of any) all of whose devices together hold the demand: as one stage,
    or where that does not do, as few as possible."""
    known = (target for target in known_targets() if chip in (None, target.chip))
    for target in sorted(known, key=lambda target: target.num_devices):
        for pp_size in _stage_counts(target.num_devices):
            tp_size = target.num_devices // pp_size
            if demand.fits(target.chip, tp_size, pp_size):
                return Fit(target, tp_size, pp_size)
    return None


def _stage_counts(num_devices: int) -> list[int]:
    return [count for count in (1, *_PP_SIZES) if num_devices % count == 0]


def weights_too_large(
    demand: Demand, target: Target, tp_size: int, pp_size: int = 1, partition: Sequence[int] | None = None
) -> str | None:
    """A sentence if the weights alone do not fit, with by how much and what would hold them; else None."""
    stages = demand.stages(pp_size, partition)
    sizes = [demand.weight_bytes(stage, tp_size) for stage in stages]
    weights, budget = max(sizes), demand.budget(target.chip)
    if weights < budget:
        return None
    largest = sizes.index(weights)
    whose = "The weights" if pp_size == 1 else f"The weights of {stage_name(stages[largest], largest, pp_size)}"
    options = f"--tp-size {tp_size}" if pp_size == 1 else f"--pp-size {pp_size} and --tp-size {tp_size}"
    return (
        f"{whose} take {weights / GIB:.1f} GiB of each {target.chip.name} device with {options}, and "
        f"{budget / GIB:.1f} GiB may be used (--mem-fraction-static {demand.mem_fraction:g} of "
        f"{target.chip.hbm_bytes / GIB:.1f}): {(weights - budget) / GIB:.1f} GiB too much. "
        f"{suggestion(demand, target, tp_size, pp_size)}"
    )


def stage_name(config: ModelConfig, number: int, pp_size: int) -> str:
    """`stage 2 of 2 (layers 40-79)`; counted from 1, layers from 0."""
    layers = config.own_layers
    return f"stage {number + 1} of {pp_size} (layers {layers[0]}-{layers[-1]})"


def suggestion(demand: Demand, target: Target, tp_size: int, pp_size: int = 1) -> str:
    """Sentences that name what would do on this target, if more stages would, and the smallest slice that would do."""
    more = [count for count in _PP_SIZES if count > pp_size and count * tp_size <= target.num_devices]
    here = next((count for count in more if demand.fits(target.chip, tp_size, count)), None)
    on_target = "" if here is None else f"{Fit(target, tp_size, here).options} would do on {target.name}. "
    return on_target + _smallest(demand, target.chip)


def _smallest(demand: Demand, chip: ChipSpec) -> str:
    found = smallest_fit(demand, chip)
    where = f"{chip.name} slice"
    if found is None:
        found, where = smallest_fit(demand), "known slice"
    if found is None:
        return "No known slice holds them and one request of full length."
    return (
        f"The smallest {where} that holds them and one request of {demand.context_len} tokens is {found.target.name} with "
        f"{found.options}."
    )
