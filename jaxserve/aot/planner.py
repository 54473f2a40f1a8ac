"""The capacity plan: what fits on hardware that is not at hand, what its programs take, and how fast they could be.

options, config.json, target -> blueprints -> memory budgets -> programs -> plan

There is a blueprint for each stage of a pipeline; a model that is not divided is one stage. The budgets are those a server
draws up when it starts (executor.memory), and then every program is compiled with that pool by the compiler of the target,
which refuses what does not fit. Where steps turn out to need more than --mem-fraction-static leaves them, the pool is cut and
the programs are compiled again. No weights are read and no device is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxserve.aot.capacity_plan import CapacityPlan, PlanOptions, StagePlan, StepPart, StepPlan
from jaxserve.aot.fitting import Demand, stage_name, suggestion, weights_too_large
from jaxserve.aot.hand_over import hand_over_bytes_per_s
from jaxserve.aot.pipeline_roofline import PipelinePrediction, joined, shard_of
from jaxserve.aot.plan_notes import notes_of
from jaxserve.aot.programs import ProgramReport
from jaxserve.aot.roofline import Interconnect, ModelShard, Prediction, StepShape, predict, step_work
from jaxserve.aot.stage_programs import Reports, StagePrograms
from jaxserve.aot.targets import Target, links_per_chip, without_devices
from jaxserve.config import KV_CACHE_DTYPES, ServerArgs
from jaxserve.executor.blueprint import Blueprint, placement_of
from jaxserve.executor.forward_batch import Bucket
from jaxserve.executor.memory import (
    DeviceMemory,
    MemoryBudget,
    StepMemory,
    alike_budgets,
    memory_budget,
    memory_lines,
    row_table_bytes,
    weight_bytes,
)
from jaxserve.executor.mesh import make_meshes
from jaxserve.executor.pool_sizes import longest_of
from jaxserve.executor.resolve import platform_defaults
from jaxserve.models import ModelConfig


def plan_capacity(args: ServerArgs, config: ModelConfig, target: Target, options: PlanOptions) -> CapacityPlan:
    """ValueError or RuntimeError with a sentence for what was asked wrongly or is not installed.

    What cannot work on this target is the plan's `failure`.
    """
    target.check(args.pp_size, args.tp_size)
    without_devices()
    config = config.replace(quantization=args.quantization)
    demand = _demand(args, config, target)
    too_large = weights_too_large(demand, target, args.tp_size, args.pp_size, args.pp_layer_partition)
    if too_large:
        return CapacityPlan(target, args, config, failure=too_large)
    meshes = make_meshes(args.pp_size, args.tp_size, list(target.devices()), attn_dp_size=args.attn_dp_size)
    blueprints = Blueprint.draw_stages(args, config, meshes)
    first = blueprints[0]
    notes = tuple(notes_of(blueprints, target))
    plan = CapacityPlan(target, first.args, config, first.backend.name, notes=notes)
    return _Planner(blueprints, target, demand, options).complete(plan)


def _demand(args: ServerArgs, config: ModelConfig, target: Target) -> Demand:
    defaults = platform_defaults(target.chip.platform)
    dtype = defaults.dtype if args.dtype == "auto" else args.dtype
    kv_dtype = KV_CACHE_DTYPES[args.kv_cache_dtype]
    return Demand(
        config.replace(expert_placement=placement_of(args, config), attn_dp_size=args.attn_dp_size),
        dtype,
        dtype if kv_dtype == "auto" else kv_dtype,
        args.context_length or config.context_len,
        args.mem_fraction_static or defaults.mem_fraction_static,
        row_table_bytes(args.max_running_requests or defaults.max_running_requests, config.vocab_size),
        args.dcp_size,
    )


@dataclasses.dataclass(frozen=True)
class _Budgets:
    """Of each stage, with as many pages in all of them."""

    stages: tuple[MemoryBudget, ...]
    decides: int  # the number of the stage that has room for the fewest pages


@dataclasses.dataclass(frozen=True)
class _Planner:
    blueprints: Sequence[Blueprint]  # of the stages
    target: Target
    demand: Demand
    options: PlanOptions

    def complete(self, plan: CapacityPlan) -> CapacityPlan:
        first, programs = self.blueprints[0], [self._stage_programs(number) for number in range(len(self.blueprints))]
        try:
            budgets = self._budgets([None] * len(programs))
            num_pages = budgets.stages[0].num_pages
            reports = [stage.compile(num_pages) for stage in programs]
            tried = self._filled(plan, budgets, reports)
            if self.options.compile == "none" or (first.args.max_total_tokens is not None and tried.failure):
                return tried
            measured = [stage.step_memory(found, num_pages) for stage, found in zip(programs, reports, strict=True)]
            budgets = self._budgets(measured)
            if tried.failure or budgets.stages[0].num_pages != num_pages:
                num_pages = budgets.stages[0].num_pages
                reports = [stage.compile(num_pages) for stage in programs]
        except ValueError as error:
            args = first.args
            more = suggestion(self.demand, self.target, args.tp_size, args.pp_size)
            return dataclasses.replace(plan, failure=f"{error} {more}")
        return self._filled(plan, budgets, reports)

    def _stage_programs(self, number: int) -> StagePrograms:
        folder = self.options.save_to
        if folder is not None and len(self.blueprints) > 1:
            folder = folder / f"stage{number + 1}"
            folder.mkdir(exist_ok=True)
        return StagePrograms(self.blueprints[number], self.options.compile, folder, self.options.show_progress)

    # --- memory

    def _budgets(self, measured: Sequence[StepMemory | None]) -> _Budgets:
        """ValueError if a stage has no room."""
        hbm = self.target.chip.hbm_bytes
        plans = [
            (blueprint, DeviceMemory(hbm, hbm - weight_bytes(blueprint)), steps)
            for blueprint, steps in zip(self.blueprints, measured, strict=True)
        ]
        rooms = []
        for number, stage in enumerate(plans):
            try:
                rooms.append(memory_budget(*stage).fitting_pages)
            except ValueError as error:
                raise ValueError(f"{self._of_stage(number)}{error}") from error
        return _Budgets(alike_budgets(plans), rooms.index(min(rooms)))

    def _of_stage(self, number: int) -> str:
        """What a sentence about one of several stages begins with."""
        pp_size = len(self.blueprints)
        return "" if pp_size == 1 else f"Of {stage_name(self.blueprints[number].config, number, pp_size)}: "

    # --- the plan

    def _filled(self, plan: CapacityPlan, budgets: _Budgets, reports: Sequence[Reports]) -> CapacityPlan:
        """With what is known of the stages and the steps."""
        stages = tuple(
            StagePlan(blueprint.config, budget, "\n".join(memory_lines(budget, blueprint)), _others(blueprint, found))
            for blueprint, budget, found in zip(self.blueprints, budgets.stages, reports, strict=True)
        )
        steps = tuple(self._step(bucket, budgets, reports) for bucket in self.blueprints[0].buckets.all)
        plan = dataclasses.replace(plan, stages=stages, decides=budgets.decides, steps=steps)
        return dataclasses.replace(plan, failure=self._failure(plan, reports))

    def _failure(self, plan: CapacityPlan, reports: Sequence[Reports]) -> str | None:
        for number, (stage, found) in enumerate(zip(plan.stages, reports, strict=True)):
            start = self._of_stage(number)
            for program in found.values():
                if program.error:
                    cache = f"a KV cache of {plan.kv_tokens} tokens"
                    return f"{start}{program.name} does not compile with {cache}: {program.error}"
            if stage.memory.free < 0:
                return (
                    f"{start}{-stage.memory.free / 2**30:.2f} GiB are missing on each device for a KV cache of "
                    f"{plan.kv_tokens} tokens: lower --mem-fraction-static or --max-total-tokens."
                )
        return None

    # --- times

    def _step(self, bucket: Bucket, budgets: _Budgets, reports: Sequence[Reports]) -> StepPlan:
        shards = [shard_of(blueprint) for blueprint in self.blueprints]
        at_once = self._steps_at_once(bucket)
        shape = self._shape(bucket, at_once, budgets.stages[0])
        works = [step_work(shard, shape) for shard in shards]
        predictions = tuple(self._predict(shard, shape) for shard in shards)
        devices = [list(blueprint.mesh.devices.flat) for blueprint in self.blueprints]
        hand_over_s = tuple(
            work.handed_on_bytes / hand_over_bytes_per_s(self.target, sends, receives)
            for work, sends, receives in zip(works[:-1], devices[:-1], devices[1:], strict=True)
        )
        whole = joined(shards)
        together = dataclasses.replace(shape, num_rows=shape.num_rows * (at_once if bucket.decode_only else 1))
        return StepPlan(
            bucket,
            shape,
            tuple(StepPart(work, found.get(bucket)) for work, found in zip(works, reports, strict=True)),
            PipelinePrediction(predictions, hand_over_s, at_once if bucket.decode_only else None),
            None if whole is None else together.all_tokens / self._predict(whole, together).step_s,
        )

    def _steps_at_once(self, bucket: Bucket) -> int:
        """Of different requests, as many as a server takes."""
        rows = self.blueprints[0].args.max_running_requests
        assert rows is not None
        return min(max(rows // bucket.total_rows, 1), len(self.blueprints))

    def _shape(self, bucket: Bucket, at_once: int, budget: MemoryBudget) -> StepShape:
        blueprint, rows = self.blueprints[0], bucket.num_rows
        assert blueprint.args.context_length
        if bucket.decode_only:
            limit = min(self.options.assumed_context, blueprint.args.context_length)
            longest = longest_of(budget.kv_groups, blueprint.page_size, rows * at_once, limit)
            tokens = bucket.tokens_per_row
            shape = StepShape(rows, tokens, max(longest, tokens), sampled_tokens=tokens)
        else:  # prompts of equal length, from their beginning
            shape = StepShape(rows, bucket.num_tokens // rows, bucket.num_tokens // rows)
        return dataclasses.replace(shape, num_shards=bucket.num_shards, is_packed=bucket.packs_tokens)

    def _predict(self, shard: ModelShard, shape: StepShape) -> Prediction:
        chip = self.target.chip
        interconnect = Interconnect.of(chip, shard.tp_size, links_per_chip(self.target, shard.tp_size))
        return predict(step_work(shard, shape), chip, shard.dtype, interconnect)


def _others(blueprint: Blueprint, reports: Reports) -> tuple[ProgramReport, ...]:
    """Reports of what is no forward half of a step."""
    return tuple(report for key, report in reports.items() if key not in blueprint.buckets.all)
