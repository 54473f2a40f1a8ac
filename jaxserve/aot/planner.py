"""The capacity plan: what fits on hardware that is not at hand, what its programs take, and how fast they could be.

options, config.json, target -> blueprint -> memory budget -> programs -> plan

The budget is the one a server draws up when it starts (executor.memory), and then every program is compiled with that pool by
the compiler of the target, which refuses what does not fit. Where steps turn out to need more than --mem-fraction-static leaves
them, the pool is cut and the programs are compiled again. No weights are read and no device is used.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxserve.aot.fitting import Demand, suggestion, weights_too_large
from jaxserve.aot.programs import Compilation, ProgramReport
from jaxserve.aot.roofline import Interconnect, ModelShard, Prediction, StepShape, StepWork, predict, step_work
from jaxserve.aot.targets import Target, links_per_chip, without_devices
from jaxserve.config import KV_CACHE_DTYPES, ServerArgs
from jaxserve.executor.blueprint import Blueprint, NumPages, placement_of
from jaxserve.executor.forward_batch import Bucket
from jaxserve.executor.memory import (
    DeviceMemory,
    MemoryBudget,
    StepMemory,
    memory_budget,
    memory_lines,
    row_table_bytes,
    weight_bytes,
)
from jaxserve.executor.mesh import make_mesh
from jaxserve.executor.pool_sizes import longest_of, num_requests
from jaxserve.executor.programs import ProgramKey, program_name
from jaxserve.executor.resolve import platform_defaults
from jaxserve.executor.warmup import compile_all
from jaxserve.kernels.api import choose_backend, choose_latent_backend
from jaxserve.models import ModelConfig

# Pages of the pool that the largest step is compiled with to learn what it takes, where it does not fit beside the first pool.
_PROBE_PAGES = 64


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What a plan is asked beside the server's own options."""

    compile: str = "all"  # every program of a server, those that decide about memory, or none
    assumed_context: int = 4096  # tokens of each decode row in the predictions
    save_to: Path | None = None  # folder for the compiled programs
    show_progress: bool = True


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A bucket of the forward pass: what it has to do at least, and what the compiler made of it."""

    bucket: Bucket
    shape: StepShape
    work: StepWork
    prediction: Prediction
    program: ProgramReport | None  # None: not compiled


@dataclasses.dataclass(frozen=True)
class CapacityPlan:
    target: Target
    args: ServerArgs  # without an "auto" left, if a blueprint could be drawn
    config: ModelConfig
    backend: str = ""
    memory: MemoryBudget | None = None  # a server's, with these options on this target
    memory_text: str = ""
    steps: tuple[StepPlan, ...] = ()
    others: tuple[ProgramReport, ...] = ()  # sampling, page table, row tables
    notes: tuple[str, ...] = ()
    failure: str | None = None  # a sentence: why this cannot work

    @property
    def kv_tokens(self) -> int:
        """What the pools of the first KV group hold."""
        return 0 if self.memory is None else self.args.attn_dp_size * self.memory.num_pages[0] * (self.args.page_size or 1)

    @property
    def full_requests(self) -> int:
        if self.memory is None:
            return 0
        each = num_requests(self.memory.kv_groups, self.args.page_size or 1, self.args.context_length or 1)
        return self.args.attn_dp_size * each

    @property
    def programs(self) -> tuple[ProgramReport, ...]:
        return (*(step.program for step in self.steps if step.program), *self.others)


def plan_capacity(args: ServerArgs, config: ModelConfig, target: Target, options: PlanOptions) -> CapacityPlan:
    """ValueError or RuntimeError with a sentence for what was asked wrongly or is not installed.

    What cannot work on this target is the plan's `failure`.
    """
    if args.tp_size > target.num_devices:
        raise ValueError(f"--tp-size {args.tp_size} needs as many devices; {target.name} has {target.num_devices}.")
    without_devices()
    config = config.replace(quantization=args.quantization)
    demand = _demand(args, config, target)
    too_large = weights_too_large(demand, target, args.tp_size)
    if too_large:
        return CapacityPlan(target, args, config, failure=too_large)
    blueprint = Blueprint.draw(args, config, make_mesh(args.tp_size, list(target.devices()), attn_dp_size=args.attn_dp_size))
    plan = CapacityPlan(target, blueprint.args, config, blueprint.backend.name, notes=tuple(_notes(blueprint, target)))
    return _Planner(blueprint, target, demand, options).complete(plan)


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
    )


@dataclasses.dataclass(frozen=True)
class _Planner:
    blueprint: Blueprint
    target: Target
    demand: Demand
    options: PlanOptions

    def complete(self, plan: CapacityPlan) -> CapacityPlan:
        is_fixed = self.blueprint.args.max_total_tokens is not None
        try:
            plan = self._with_budget(plan, self._budget(None))
            if self.options.compile == "none" or (is_fixed and plan.failure):
                return plan
            assert plan.memory is not None
            budget = self._budget(self._step_memory(plan))
            if plan.failure or budget.num_pages != plan.memory.num_pages:
                return self._with_budget(plan, budget)
        except ValueError as error:
            return dataclasses.replace(plan, failure=f"{error} {suggestion(self.demand, self.target.chip)}")
        return self._judged(plan, budget)

    def _with_budget(self, plan: CapacityPlan, budget: MemoryBudget) -> CapacityPlan:
        """The plan with its programs compiled for this budget's pool."""
        steps, others = self._programs(budget.num_pages)
        return self._judged(dataclasses.replace(plan, steps=tuple(steps), others=tuple(others)), budget)

    def _judged(self, plan: CapacityPlan, budget: MemoryBudget) -> CapacityPlan:
        plan = dataclasses.replace(plan, memory=budget, memory_text="\n".join(memory_lines(budget, self.blueprint)))
        return dataclasses.replace(plan, failure=_failure(plan, budget))

    # --- memory

    def _budget(self, steps: StepMemory | None) -> MemoryBudget:
        hbm = self.target.chip.hbm_bytes
        return memory_budget(self.blueprint, DeviceMemory(hbm, hbm - weight_bytes(self.blueprint)), steps)

    def _step_memory(self, plan: CapacityPlan) -> StepMemory:
        """From the plan's programs. ValueError if the largest do not compile beside any pool."""
        assert plan.memory is not None
        largest, num_pages = self.blueprint.program_set.largest, plan.memory.num_pages
        names = [program_name(key) for key in largest]
        reports = [program for program in plan.programs if program.name in names]
        if any(program.error for program in plan.programs):
            num_pages = self.blueprint.pages_each(_PROBE_PAGES)
            reports = self._compile(num_pages, largest)
        for report in reports:
            if report.error:
                raise ValueError(f"{report.name} does not compile: {report.error}")
        reports = sorted(reports, key=lambda report: names.index(report.name))
        return StepMemory.of(self.blueprint, [report.memory for report in reports], num_pages)

    # --- programs

    def _programs(self, num_pages: NumPages) -> tuple[list[StepPlan], list[ProgramReport]]:
        """Steps in the order of the buckets, and the other programs of a server."""
        buckets = self.blueprint.buckets
        chosen: tuple[ProgramKey, ...] = ()
        if self.options.compile == "all":
            chosen = self.blueprint.program_set.all
        elif self.options.compile == "largest":
            chosen = self.blueprint.program_set.largest
        reports = dict(zip(chosen, self._compile(num_pages, chosen), strict=True))
        steps = [self._step(bucket, num_pages, reports.pop(bucket, None)) for bucket in buckets.all]
        return steps, list(reports.values())

    def _compile(self, num_pages: NumPages, keys: Any) -> list[ProgramReport]:
        programs, params = self.blueprint.programs(num_pages), self.blueprint.abstract_params()
        kv_cache = self.blueprint.kv_cache(num_pages)
        pool = [(kv_cache.pages.count, *page.shape) for page in jax.tree.leaves(kv_cache.pages.arrays)]
        lower: dict[Any, Callable[[], Compilation]] = {}
        for key in keys:
            make = functools.partial(programs.lower, key, params)
            lower[key] = functools.partial(self._compilation, program_name(key), make, tuple(pool))
        return list(compile_all(lower, show_progress=self.options.show_progress).values()) if lower else []

    def _compilation(self, name: str, lower: Callable[[], Any], pool: tuple[tuple[int, ...], ...]) -> Compilation:
        platform = self.blueprint.platform
        options = {"xla_gpu_autotune_level": "0"} if platform == "gpu" else None  # autotuning needs the device
        return Compilation(name, lower(), platform, pool, options, self.options.save_to)

    def _step(self, bucket: Bucket, num_pages: NumPages, program: ProgramReport | None) -> StepPlan:
        blueprint, chip = self.blueprint, self.target.chip
        args, config = blueprint.args, blueprint.config
        assert args.context_length
        token_bytes = sum(blueprint.page_bytes) / len(config.windows) / blueprint.page_size
        shard = ModelShard(config, args.dtype, args.tp_size, token_bytes)
        rows = bucket.num_rows
        if bucket.decode_only:
            limit = min(self.options.assumed_context, args.context_length)
            longest = longest_of(blueprint.spec(num_pages).kv_groups, blueprint.page_size, rows, limit)
            tokens = bucket.tokens_per_row
            shape = StepShape(rows, tokens, max(longest, tokens), sampled_tokens=tokens)
        else:  # prompts of equal length, from their beginning
            shape = StepShape(rows, bucket.num_tokens // rows, bucket.num_tokens // rows)
        shape = dataclasses.replace(shape, num_shards=bucket.num_shards, is_packed=bucket.packs_tokens)
        work = step_work(shard, shape)
        interconnect = Interconnect.of(chip, args.tp_size, links_per_chip(self.target, args.tp_size))
        return StepPlan(bucket, shape, work, predict(work, chip, args.dtype, interconnect), program)


def _failure(plan: CapacityPlan, budget: MemoryBudget) -> str | None:
    failed = [program for program in plan.programs if program.error]
    if failed:
        return f"{failed[0].name} does not compile with a KV cache of {plan.kv_tokens} tokens: {failed[0].error}"
    if budget.free < 0:
        return (
            f"{-budget.free / 2**30:.2f} GiB are missing on each device for a KV cache of {plan.kv_tokens} tokens: "
            "lower --mem-fraction-static or --max-total-tokens."
        )
    return None


def _notes(blueprint: Blueprint, target: Target) -> list[str]:
    args, config, notes = blueprint.args, blueprint.config, []
    if target.chip.warning:
        notes.append(target.chip.warning)
    if args.tp_size < target.num_devices:
        notes.append(f"{target.num_devices - args.tp_size} of the {target.num_devices} devices stay idle.")
    if target.num_hosts > 1:
        notes.append(f"{target.name} spans {target.num_hosts} hosts; `jaxserve serve` runs on the devices of one host today.")
    devices = args.attn_tp_size
    if config.latent_dim is not None and devices > 1:
        notes.append(
            f"Each of the {devices} devices keeps the latents of all tokens: they hold no more tokens than one would beside "
            f"the same weights. With --attn-dp-size {args.tp_size} each keeps those of other requests."
        )
    elif devices > config.num_kv_heads:
        notes.append(
            f"Each of the {config.num_kv_heads} KV heads is kept on {devices // config.num_kv_heads} devices, which "
            f"hold no more tokens together than {config.num_kv_heads} would beside the same weights (--attn-dp-size)."
        )
    if blueprint.backend.name == "reference":
        try:
            choose = choose_backend if config.latent_dim is None else choose_latent_backend
            choose("pallas", blueprint.backend.spec)
        except NotImplementedError as error:
            notes.append(f"Attention runs without our kernels, which is slow: {error}")
    return notes
