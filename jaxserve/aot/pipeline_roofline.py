"""The least time of a step through the stages of a pipeline, and how soon another can follow. One stage is a pipeline, too.

A stage computes a step while others compute other steps, and what it hands on travels meanwhile: of a full pipeline only the
slowest stage counts. A request has one decode step under way at a time, so that requests must be dealt to several steps; with
fewer of them than stages, each waits for itself to come through.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxserve.aot.roofline import ModelShard, Prediction
from jaxserve.executor.blueprint import Blueprint
from jaxserve.models import check_tp


@dataclasses.dataclass(frozen=True)
class PipelinePrediction:
    stages: tuple[Prediction, ...]
    hand_over_s: tuple[float, ...]  # behind each stage but the last
    steps_at_once: int | None  # of steps that follow from each other; None: as many as there are stages, and more

    @property
    def slowest(self) -> int:
        """The number of a stage, from 0."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].step_s)

    @property
    def bound(self) -> str:
        return self.stages[self.slowest].bound

    @property
    def latency_s(self) -> float:
        """Of a step, through all stages."""
        return sum(stage.step_s for stage in self.stages) + sum(self.hand_over_s)

    @property
    def interval_s(self) -> float:
        """From one step to the next, on average."""
        waits_s = 0.0 if self.steps_at_once is None else self.latency_s / self.steps_at_once
        return max(self.stages[self.slowest].step_s, waits_s)


def shard_of(blueprint: Blueprint) -> ModelShard:
    """What a device of its stage holds."""
    args, config = blueprint.args, blueprint.config.replace(native_products=False)  # which is how weights lie, not how many
    pages = jax.tree.leaves(blueprint.backend.kv_pages())
    token_bytes = sum(page.nbytes for page in pages) / blueprint.page_size
    return ModelShard(config, str(jnp.dtype(args.dtype)), args.tp_size, token_bytes, args.dcp_size)


def joined(shards: Sequence[ModelShard]) -> ModelShard | None:
    """The same devices as one stage; None where the model cannot be split so, or where it is no plain matter of splitting."""
    shard = shards[0]
    config, tp_size = shard.config.replace(stage=None), shard.tp_size * len(shards)
    if config.attn_dp_size > 1 or config.expert_placement is not None or len(shards) == 1:
        return None
    try:
        check_tp(config, tp_size)
    except ValueError:
        return None
    heads = [max(config.num_kv_heads // size, 1) for size in (tp_size, shard.tp_size)]
    return dataclasses.replace(shard, config=config, tp_size=tp_size, kv_token_bytes=shard.kv_token_bytes * heads[0] / heads[1])
