"""From ServerArgs to a warm ModelRunner: mesh, config, weights, memory, compilation, in that order."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from jaxserve.config import ServerArgs
from jaxserve.executor import distributed
from jaxserve.executor.adapter_store import AdapterStore
from jaxserve.executor.background import BackgroundCompiler, Order
from jaxserve.executor.blueprint import Blueprint, NumPages
from jaxserve.executor.compilation import ProgramCompiler
from jaxserve.executor.compile_counter import CompileCounter, in_context
from jaxserve.executor.expert_record import ExpertRecord
from jaxserve.executor.memory import (
    DeviceMemory,
    MemoryBudget,
    ProgramMemory,
    StepMemory,
    alike_budgets,
    measure,
    memory_lines,
    weight_bytes,
)
from jaxserve.executor.mesh import Sizes, check_given, is_here, make_meshes, select_devices
from jaxserve.executor.model_runner import ModelRunner
from jaxserve.executor.own_settings import own_settings
from jaxserve.executor.programs import ProgramKey
from jaxserve.executor.resolve import with_lora_of
from jaxserve.executor.stage import DistantStage, RunningStage, Stage
from jaxserve.executor.step import Params
from jaxserve.executor.warmup import cache_folder, compile_all, jax_cache
from jaxserve.executor.weights import WeightLoader
from jaxserve.handover import Handover
from jaxserve.models import ModelConfig

logger = logging.getLogger(__name__)

# Pages of the pool that the largest steps are compiled with to learn what they take.
_PROBE_PAGES = 64


@dataclasses.dataclass(frozen=True)
class BuiltRunner:
    """A runner that is ready to serve, and the options as they were resolved."""

    runner: ModelRunner
    args: ServerArgs
    model_config: ModelConfig


def build_runner(
    args: ServerArgs,
    *,
    warmup: str = "full",
    show_progress: bool = True,
    devices: Sequence[jax.Device] | None = None,
    handover: Handover | None = None,
) -> BuiltRunner:
    """Raises ValueError or OSError with a sentence for what a user can mend (options, checkpoint, memory).

    `warmup` as --warmup; early: with the programs that serve anything, and `Runner.tend` takes in the others.

    `devices`: those of a program that runs in this process, which goes on with JAX as it has set it up; `handover`: where that
    program leaves weights. Without them the process is the runner's own.
    """
    counter = CompileCounter(only_ours=devices is not None)
    with counter.ours(), contextlib.nullcontext() if devices is None else own_settings():
        return _build(args, warmup, show_progress, devices, handover, counter)


def _build(
    args: ServerArgs,
    warmup: str,
    show_progress: bool,
    devices: Sequence[jax.Device] | None,
    handover: Handover | None,
    counter: CompileCounter,
) -> BuiltRunner:
    is_guest = devices is not None
    before_s = {} if is_guest else {"imports": time.time() - psutil.Process().create_time()}
    blueprints = draw_blueprints(args, devices)
    blueprint = blueprints[-1]
    builder = _Builder(blueprints, cache_folder(args.compilation_cache_dir), show_progress, is_guest)
    logger.info("Attention backend: %s, %d tokens per page", blueprint.backend.name, blueprint.page_size)
    can_be_early = not is_guest and blueprint.platform == "cpu" and distributed.is_alone() and len(blueprints) == 1
    parts = builder.make(is_early=warmup == "early" or (warmup == "auto" and can_be_early))
    programs = blueprint.server_programs
    missing = [key for key in programs.later if key not in parts.stages[-1].keys] if len(blueprints) == 1 else []
    # Another process could only leave them in the cache; and it would not have devices like those that a program has.
    by_process = not is_guest and blueprint.platform == "cpu" and os.access(builder.folder, os.W_OK)
    order = Order(args=with_lora_of(args, blueprint.args), num_pages=parts.num_pages) if by_process else None
    runner = ModelRunner(
        program_set=programs,
        stages=parts.stages,
        later=BackgroundCompiler(parts.compilers[-1], missing, order) if missing else None,
        spec=blueprint.spec(parts.num_pages),
        compile_counter=counter,
        loader=builder.loader,
        model_path=args.model_path,
        load_format=args.load_format,
        expert_record=ExpertRecord(blueprint.config.num_layers, blueprint.config.sparse_layers),
        adapters=builder.adapters,
        handover=handover,
        startup_s={**before_s, **builder.took_s},
    )
    logger.info("KV cache of %d tokens", runner.spec.max_total_tokens)
    return BuiltRunner(runner, blueprint.args, blueprint.config)


def draw_blueprints(args: ServerArgs, devices: Sequence[jax.Device] | None = None) -> tuple[Blueprint, ...]:
    """Of each stage, on those devices of a program that runs in this process, or on this machine's, which JAX starts here if it
    has not yet."""
    if devices is None:
        select_devices(args.device, args.num_local_devices)
    else:
        check_given(devices, Sizes(args.pp_size, args.tp_size, 1), args.device)
        if jax.config.values["jax_enable_x64"]:
            raise ValueError("jax_enable_x64 must be off where an engine computes: its programs are of int32 and float32.")
    meshes = make_meshes(args.pp_size, args.tp_size, devices, attn_dp_size=args.attn_dp_size, dp_size=args.dp_size)
    overrides = json.loads(args.json_model_override_args)
    config = ModelConfig.from_pretrained(args.model_path, overrides, is_embedding=args.is_embedding)
    return Blueprint.draw_stages(args, config, meshes)


@dataclasses.dataclass(frozen=True)
class Filled:
    """What a cache holds for a server: all its programs, `compiled` of them new."""

    programs: int
    compiled: int


def fill_cache(args: ServerArgs, folder: str) -> Filled:
    """Puts all programs of a server with these options on this machine's devices into the cache that it would have with
    `--compilation-cache-dir folder`, without weights.

    On CPU the pool follows from memory as it is now; on accelerators a server finds a little less once its weights are there,
    so that only --max-total-tokens makes the programs the same. ValueError or OSError with a sentence.
    """
    blueprints, path = draw_blueprints(args), cache_folder(folder)
    return compile_into(path, blueprints, plan_memory(blueprints, path, weights_loaded=False)[-1].num_pages)


def compile_into(folder: pathlib.Path, blueprints: Sequence[Blueprint], num_pages: NumPages) -> Filled:
    """Of all programs of all stages; the devices may be elsewhere."""
    counter, num_programs = CompileCounter(), 0
    for blueprint in blueprints:
        keys = blueprint.program_set.all
        ProgramCompiler.of(blueprint, num_pages, folder).obtain(keys, show_progress=True)
        num_programs += len(keys)
    return Filled(num_programs, counter.count)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What a runner is put together from."""

    stages: list[Stage]
    compilers: list[ProgramCompiler]  # of the stages on this host

    @property
    def num_pages(self) -> NumPages:
        return self.compilers[-1].num_pages


@dataclasses.dataclass(frozen=True)
class _Builder:
    blueprints: Sequence[Blueprint]  # of all stages
    folder: pathlib.Path  # of the caches
    show_progress: bool
    is_guest: bool  # on devices of a program that runs here
    took_s: dict[str, float] = dataclasses.field(default_factory=dict)  # seconds of each part; they may overlap

    @functools.cached_property
    def loader(self) -> WeightLoader:
        args, config = self._args, self.blueprints[0].config.replace(stage=None)
        return WeightLoader(
            config=config,
            context_len=args.context_length or config.context_len,
            stages=tuple((blueprint.config.stage, blueprint.mesh) for blueprint in self.own),
            dtype=jnp.dtype(args.dtype),
            model_override_args=args.json_model_override_args,
        )

    @property
    def adapters(self) -> AdapterStore | None:
        layouts = [blueprint.adapters for blueprint in self.blueprints]
        if layouts[0] is None:
            return None
        modules = {name: shape for layout in layouts if layout for name, shape in layout.modules.items()}
        return AdapterStore([blueprint.adapters for blueprint in self.own if blueprint.adapters], modules)

    @functools.cached_property
    def own(self) -> list[Blueprint]:
        """Of the stages on this host."""
        return own_of(self.blueprints)

    @property
    def _args(self) -> ServerArgs:
        return self.blueprints[0].args

    def make(self, *, is_early: bool) -> _Parts:
        """With all programs, or the essential ones and of those for short prompts what is cached."""
        if self.blueprints[0].platform != "cpu":
            with contextlib.nullcontext() if self.is_guest else jax_cache(self.folder):
                params = self._load_weights()
            compilers = self._compilers(weights_loaded=True)
            return self._parts(params, compilers, self._obtain(compilers, is_early=is_early))
        # Nothing here depends on the weights but by their size: both at once.
        self.loader.check_files(self._args.model_path, self._args.load_format)
        compilers = self._compilers(weights_loaded=False)
        with concurrent.futures.ThreadPoolExecutor(1, "weights") as thread:
            loading = thread.submit(in_context(self._load_weights))
            programs = self._obtain(compilers, is_early=is_early)
            return self._parts(loading.result(), compilers, programs)

    def _parts(
        self, params: tuple[Params, ...], compilers: list[ProgramCompiler], programs: list[dict[ProgramKey, Any]]
    ) -> _Parts:
        stages: list[Stage] = []
        num_pages, running = compilers[-1].num_pages, zip(compilers, programs, params, strict=True)
        for blueprint in self.blueprints:
            if is_here(blueprint.mesh):
                compiler, compiled, weights = next(running)
                stages.append(RunningStage(blueprint.mesh, compiled, weights, compiler.programs))
            else:
                stages.append(DistantStage(blueprint.mesh, blueprint.program_set.all, blueprint.programs(num_pages)))
        return _Parts(stages, compilers)

    def _compilers(self, *, weights_loaded: bool) -> list[ProgramCompiler]:
        budgets = plan_memory(self.blueprints, self.folder, weights_loaded=weights_loaded, is_guest=self.is_guest)
        compilers = []
        for blueprint, budget in zip(self.own, budgets, strict=True):
            for line in memory_lines(budget, blueprint):
                logger.info("%s", line)
            compilers.append(ProgramCompiler.of(blueprint, budget.num_pages, self.folder))
        return compilers

    def _load_weights(self) -> tuple[Params, ...]:
        with self._timed("weights"):
            return self.loader.load(self._args.model_path, self._args.load_format, progress=self.show_progress)

    def _obtain(self, compilers: list[ProgramCompiler], *, is_early: bool) -> list[dict[ProgramKey, Any]]:
        """The programs of each stage here."""
        sets = [blueprint.program_set for blueprint in self.own]
        chosen = [programs.essential if is_early else programs.all for programs in sets]
        with self._timed(f"{sum(map(len, chosen))} programs"):
            found = [
                compiler.obtain(keys, show_progress=self.show_progress)
                for compiler, keys in zip(compilers, chosen, strict=True)
            ]
            if is_early:
                found[-1] |= compilers[-1].load_all(key for key in sets[-1].for_short_prompts if key not in found[-1])
            return found

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started_s = time.monotonic()
        yield
        self.took_s[what] = time.monotonic() - started_s
        logger.info("%s: %.1f s", what, self.took_s[what])


def own_of(blueprints: Sequence[Blueprint]) -> list[Blueprint]:
    """Those of stages with devices of this host."""
    return [blueprint for blueprint in blueprints if is_here(blueprint.mesh)]


def plan_memory(
    blueprints: Sequence[Blueprint], folder: pathlib.Path, *, weights_loaded: bool, is_guest: bool = False
) -> tuple[MemoryBudget, ...]:
    """Of the devices of each stage here as they are now, with pools of the same pages in all; `folder` of the cache. Steps are
    compiled for it only where they decide about the pool. `is_guest`: what else is in use now is held by somebody else."""
    plans = []
    for blueprint in own_of(blueprints):
        decides = blueprint.platform != "cpu" and blueprint.args.max_total_tokens is None
        device, weights = _fullest(blueprint), weight_bytes(blueprint)
        if not weights_loaded:
            device = dataclasses.replace(device, free=device.free - weights)
        if is_guest:
            device = dataclasses.replace(device, held=max(device.total - device.free - weights, 0))
        plans.append((blueprint, device, measure_steps(blueprint, folder) if decides else None))
    if is_guest:  # of one process: a program on several hosts may have an engine on each, and none waits for another
        return alike_budgets(plans)
    budgets = alike_budgets(plans, distributed.least)
    description = "".join(blueprint.description(budgets[-1].num_pages) for blueprint in blueprints)
    distributed.check_alike("model or other options", description)
    return budgets


def _fullest(blueprint: Blueprint) -> DeviceMemory:
    """Of the stage's devices here the one with the least room; those of a CPU share theirs."""
    devices = blueprint.mesh.local_devices[:1] if blueprint.platform == "cpu" else blueprint.mesh.local_devices
    return min((measure(device, blueprint.args.dp_size) for device in devices), key=lambda device: device.free)


def measure_steps(blueprint: Blueprint, folder: pathlib.Path | None = None) -> StepMemory:
    """What steps take beside weights and state, learnt by compiling the largest of them with a small pool, or from the cache in
    `folder`."""
    num_pages, keys = blueprint.pages_each(_PROBE_PAGES), blueprint.program_set.largest
    if folder is not None:
        compiled = ProgramCompiler.of(blueprint, num_pages, folder).obtain(keys, show_progress=False)
    else:
        programs, params = blueprint.programs(num_pages), blueprint.abstract_params()
        compiled = compile_all({key: functools.partial(programs.lower, key, params) for key in keys}, show_progress=False)
    return StepMemory.of(blueprint, [ProgramMemory.of(compiled[key].memory_analysis()) for key in keys], num_pages)
