"""The capacity plan: what fits on hardware that is not at hand, what its programs take, and how fast they could be.

options, config.json, target -> blueprint -> pool -> programs -> plan

The pool is sized as a server sizes it (executor.memory), and then every program is compiled with that pool by the compiler of
the target, which refuses what does not fit. Where steps turn out to need more than --mem-fraction-static leaves them, the pool
is cut and the programs are compiled again. No weights are read and no device is used.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxserve.aot.fitting import Demand, suggestion, weights_too_large
from jaxserve.aot.programs import Compilation, ProgramReport
from jaxserve.aot.roofline import Interconnect, ModelShard, Prediction, StepShape, StepWork, predict, step_work
from jaxserve.aot.targets import Target, links_per_chip, without_devices
from jaxserve.config import KV_CACHE_DTYPES, ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.forward_batch import Bucket
from jaxserve.executor.memory import DeviceMemory, fit_pages, limit_to_use
from jaxserve.executor.mesh import make_mesh
from jaxserve.executor.programs import SamplingKey
from jaxserve.executor.resolve import platform_defaults
from jaxserve.executor.row_tables import RowTables
from jaxserve.executor.warmup import compile_all
from jaxserve.kernels.api import choose_backend
from jaxserve.models import ModelConfig

WHAT_TO_COMPILE = ("all", "largest", "none")
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
class MemoryPlan:
    """Bytes of one device."""

    hbm: int
    weights: int
    state: int  # page table, row tables, a step's input, and what the compiler pads
    kv_pool: int
    largest_step: int  # temporaries and outputs of the program that needs most of them, and the logits of the step before it
    code: int

    @property
    def free(self) -> int:
        return self.hbm - self.weights - self.state - self.kv_pool - self.largest_step - self.code


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
    memory: MemoryPlan | None = None
    num_pages: int = 0
    server_pages: int = 0  # of them, what a server would take: no more than its rows can use
    steps: tuple[StepPlan, ...] = ()
    others: tuple[ProgramReport, ...] = ()  # sampling, page table, row tables
    notes: tuple[str, ...] = ()
    failure: str | None = None  # a sentence: why this cannot work

    @property
    def kv_tokens(self) -> int:
        return self.num_pages * (self.args.page_size or 1)

    @property
    def full_requests(self) -> int:
        return self.kv_tokens // (self.args.context_length or 1)

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
    blueprint = Blueprint.draw(args, config, make_mesh(args.tp_size, list(target.devices())))
    plan = CapacityPlan(target, blueprint.args, config, blueprint.backend.name, notes=tuple(_notes(blueprint, target)))
    return _Planner(blueprint, target, demand, options).complete(plan)


def _demand(args: ServerArgs, config: ModelConfig, target: Target) -> Demand:
    defaults = platform_defaults(target.chip.platform)
    dtype = defaults.dtype if args.dtype == "auto" else args.dtype
    kv_dtype = KV_CACHE_DTYPES[args.kv_cache_dtype]
    return Demand(
        config,
        dtype,
        dtype if kv_dtype == "auto" else kv_dtype,
        args.context_length or config.context_len,
        args.mem_fraction_static or defaults.mem_fraction_static,
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
            plan = self._with_pool(plan, self._num_pages(step_bytes=0))
            if plan.failure and not is_fixed and self.options.compile != "none":
                plan = self._with_pool(plan, self._num_pages(self._measured_step_bytes(plan)))
        except ValueError as error:
            return dataclasses.replace(plan, failure=f"{error} {suggestion(self.demand, self.target.chip)}")
        return plan

    def _with_pool(self, plan: CapacityPlan, num_pages: int) -> CapacityPlan:
        """The plan for a pool of so many pages per layer."""
        steps, others = self._programs(num_pages)
        plan = dataclasses.replace(
            plan, num_pages=num_pages, server_pages=self._limit(num_pages), steps=tuple(steps), others=tuple(others)
        )
        plan = dataclasses.replace(plan, memory=self._memory(plan))
        return dataclasses.replace(plan, failure=self._failure(plan))

    # --- memory

    def _num_pages(self, step_bytes: int) -> int:
        blueprint, hbm = self.blueprint, self.target.chip.hbm_bytes
        if blueprint.args.max_total_tokens is not None:
            return max(blueprint.args.max_total_tokens // blueprint.page_size, 1)
        return fit_pages(
            DeviceMemory(hbm, hbm - self._weights - self._state_bytes()),
            mem_fraction=self.demand.mem_fraction,
            temp_bytes=step_bytes,
            page_bytes=blueprint.page_bytes,
            page_size=blueprint.page_size,
        )

    def _measured_step_bytes(self, plan: CapacityPlan) -> int:
        """What steps need beside weights, tables and pool. ValueError if the largest step does not compile beside any pool."""
        programs = plan.programs
        if any(program.error for program in programs):
            buckets = self.blueprint.buckets
            programs = tuple(self._compile(_PROBE_PAGES, [buckets.extend[-1], SamplingKey.largest_of(buckets.decode)]))
        for program in programs:
            if program.error:
                raise ValueError(f"{program.name} does not compile: {program.error}")
        return _transient_bytes(programs) + sum(program.code_bytes for program in programs)

    @property
    def _weights(self) -> int:
        return self.demand.weight_bytes(self.blueprint.args.tp_size)

    def _state_bytes(self, argument_bytes: int = 0) -> int:
        """Resident bytes that are neither weights nor pool: the row tables, and the page table or, where a step was compiled,
        what it takes beside weights and pool: the page table, its input, padding.
        """
        spec = self.blueprint.spec(1)
        tables = jax.tree.leaves(RowTables.shapes(spec.max_rows + 1, spec.vocab_size))
        page_table_bytes = (spec.max_rows + 1) * spec.max_pages_per_row * 4
        return int(sum(shape.size * shape.dtype.itemsize for shape in tables) + max(page_table_bytes, argument_bytes))

    def _memory(self, plan: CapacityPlan) -> MemoryPlan:
        pool = plan.num_pages * self.blueprint.page_bytes
        arguments = max((step.program.argument_bytes for step in plan.steps if step.program), default=0)
        return MemoryPlan(
            hbm=self.target.chip.hbm_bytes,
            weights=self._weights,
            state=self._state_bytes(arguments - self._weights - pool),
            kv_pool=pool,
            largest_step=_transient_bytes(plan.programs),
            code=sum(program.code_bytes for program in plan.programs),
        )

    def _limit(self, num_pages: int) -> int:
        spec = self.blueprint.spec(1)
        return limit_to_use(
            num_pages,
            page_bytes=self.blueprint.page_bytes,
            max_rows=spec.max_rows,
            max_pages_per_row=spec.max_pages_per_row,
            cap_bytes=None,
        )

    def _failure(self, plan: CapacityPlan) -> str | None:
        failed = [program for program in plan.programs if program.error]
        if failed:
            return f"{failed[0].name} does not compile with a KV cache of {plan.kv_tokens} tokens: {failed[0].error}"
        assert plan.memory is not None
        if plan.memory.free < 0:
            return (
                f"{-plan.memory.free / 2**30:.2f} GiB are missing on each device for a KV cache of {plan.kv_tokens} tokens: "
                "lower --mem-fraction-static or --max-total-tokens."
            )
        return None

    # --- programs

    def _programs(self, num_pages: int) -> tuple[list[StepPlan], list[ProgramReport]]:
        """Steps in the order of the buckets, and the other programs of a server."""
        buckets = self.blueprint.buckets
        chosen: tuple[Any, ...] = ()
        if self.options.compile == "all":
            chosen = (*buckets.all, *SamplingKey.all_of(buckets.all), "page_table", "row_tables")
            if self.blueprint.drafter is not None:
                chosen = (*chosen, "history")
        elif self.options.compile == "largest":
            chosen = (buckets.extend[-1], buckets.decode[-1], SamplingKey.largest_of(buckets.decode))
        reports = dict(zip(chosen, self._compile(num_pages, chosen), strict=True))
        steps = [self._step(bucket, num_pages, reports.pop(bucket, None)) for bucket in buckets.all]
        return steps, list(reports.values())

    def _compile(self, num_pages: int, keys: Any) -> list[ProgramReport]:
        programs, params = self.blueprint.programs(num_pages), self.blueprint.abstract_params()
        pool = [
            (self.blueprint.config.num_layers * num_pages, *page.shape)
            for page in jax.tree.leaves(self.blueprint.backend.kv_pages())
        ]
        lower: dict[Any, Callable[[], Compilation]] = {}
        for key in keys:
            if isinstance(key, Bucket):
                name, make = key.name, functools.partial(programs.lower_forward, key, params)
            elif isinstance(key, SamplingKey):
                name, make = key.name, functools.partial(programs.lower_sampling, key)
            else:
                name, make = str(key).replace("_", " "), getattr(programs, f"lower_{key}")
            lower[key] = functools.partial(self._compilation, name, make, tuple(pool))
        return list(compile_all(lower, show_progress=self.options.show_progress).values()) if lower else []

    def _compilation(self, name: str, lower: Callable[[], Any], pool: tuple[tuple[int, ...], ...]) -> Compilation:
        platform = self.blueprint.platform
        options = {"xla_gpu_autotune_level": "0"} if platform == "gpu" else None  # autotuning needs the device
        return Compilation(name, lower(), platform, pool, options, self.options.save_to)

    def _step(self, bucket: Bucket, num_pages: int, program: ProgramReport | None) -> StepPlan:
        blueprint, chip = self.blueprint, self.target.chip
        args, config = blueprint.args, blueprint.config
        assert args.context_length
        token_bytes = blueprint.page_bytes / config.num_layers / blueprint.page_size
        shard = ModelShard(config, args.dtype, args.tp_size, token_bytes)
        rows = bucket.num_rows
        if bucket.decode_only:
            longest = min(self.options.assumed_context, args.context_length, num_pages * blueprint.page_size // rows)
            shape = StepShape(rows, 1, max(longest, 1))
        else:  # prompts of equal length, from their beginning
            shape = StepShape(rows, bucket.num_tokens // rows, bucket.num_tokens // rows)
        work = step_work(shard, shape)
        interconnect = Interconnect.of(chip, args.tp_size, links_per_chip(self.target, args.tp_size))
        return StepPlan(bucket, shape, work, predict(work, chip, args.dtype, interconnect), program)


def _transient_bytes(programs: Sequence[ProgramReport]) -> int:
    """The most there is at a time beside weights, state and pool: a step is launched while the one before it is sampled."""
    if not programs:
        return 0
    return max(program.step_bytes for program in programs) + max(program.new_output_bytes for program in programs)


def _notes(blueprint: Blueprint, target: Target) -> list[str]:
    args, config, notes = blueprint.args, blueprint.config, []
    if target.chip.warning:
        notes.append(target.chip.warning)
    if args.tp_size < target.num_devices:
        notes.append(f"{target.num_devices - args.tp_size} of the {target.num_devices} devices stay idle.")
    if target.num_hosts > 1:
        notes.append(f"{target.name} spans {target.num_hosts} hosts; `jaxserve serve` runs on the devices of one host today.")
    if args.tp_size > config.num_kv_heads:
        copies = args.tp_size // config.num_kv_heads
        notes.append(
            f"Each of the {config.num_kv_heads} KV heads is kept on {copies} devices: {args.tp_size} devices hold no more "
            f"tokens than {config.num_kv_heads} would beside the same weights."
        )
    if blueprint.backend.name == "reference":
        try:
            choose_backend("pallas", blueprint.backend.spec)
        except NotImplementedError as error:
            notes.append(f"Attention runs without our kernels, which is slow: {error}")
    return notes
