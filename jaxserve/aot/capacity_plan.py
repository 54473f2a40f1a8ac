"""CapacityPlan: what `jaxserve compile` finds out. Plain data; who makes it is the planner."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxserve.aot.pipeline_roofline import PipelinePrediction
from jaxserve.aot.programs import ProgramReport
from jaxserve.aot.roofline import StepShape, StepWork
from jaxserve.aot.targets import Target
from jaxserve.config import ServerArgs
from jaxserve.executor.forward_batch import Bucket
from jaxserve.executor.memory import MemoryBudget
from jaxserve.executor.pool_sizes import num_requests
from jaxserve.models import ModelConfig


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What a plan is asked beside the server's own options."""

    compile: str = "all"  # every program of a server, those that decide about memory, or none
    assumed_context: int = 4096  # tokens of each decode row in the predictions
    save_to: Path | None = None  # folder for the compiled programs
    show_progress: bool = True


@dataclasses.dataclass(frozen=True)
class StepPart:
    """What a stage has of a step: what it has to do at least, and what the compiler made of it."""

    work: StepWork
    program: ProgramReport | None  # None: not compiled


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A bucket of the forward pass, through all stages."""

    bucket: Bucket
    shape: StepShape
    parts: tuple[StepPart, ...]  # of the stages
    prediction: PipelinePrediction
    undivided_tokens_per_s: float | None  # of the same devices and requests with --tp-size alone; None: not to be had

    @property
    def programs(self) -> tuple[ProgramReport, ...]:
        return tuple(part.program for part in self.parts if part.program)

    @property
    def tokens_per_s(self) -> float:
        return self.shape.all_tokens / self.prediction.interval_s


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """A part of the model on devices of its own."""

    config: ModelConfig
    memory: MemoryBudget  # a server's, with these options on this target
    memory_text: str
    others: tuple[ProgramReport, ...]  # sampling, page table, row tables


@dataclasses.dataclass(frozen=True)
class CapacityPlan:
    target: Target
    args: ServerArgs  # without an "auto" left, if blueprints could be drawn
    config: ModelConfig  # the whole model
    backend: str = ""
    stages: tuple[StagePlan, ...] = ()  # one, if the model is not divided; none, if its weights do not fit
    decides: int = 0  # the number of the stage that has room for the fewest tokens
    steps: tuple[StepPlan, ...] = ()
    notes: tuple[str, ...] = ()
    failure: str | None = None  # a sentence: why this cannot work

    @property
    def memory(self) -> MemoryBudget | None:
        """Of the stage that decides about the KV cache."""
        return self.stages[self.decides].memory if self.stages else None

    @property
    def kv_tokens(self) -> int:
        """What the pools of the first KV group hold."""
        return 0 if self.memory is None else self.args.attn_dp_size * self.memory.num_pages[0] * (self.args.page_tokens or 1)

    @property
    def full_requests(self) -> int:
        if self.memory is None:
            return 0
        each = num_requests(self.memory.kv_groups, self.args.page_tokens or 1, self.args.context_length or 1)
        return self.args.attn_dp_size * each

    @property
    def others(self) -> tuple[ProgramReport, ...]:
        return tuple(program for stage in self.stages for program in stage.others)

    @property
    def programs(self) -> tuple[ProgramReport, ...]:
        return (*(program for step in self.steps for program in step.programs), *self.others)
