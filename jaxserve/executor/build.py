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

import jax.numpy as jnp
import psutil

from jaxserve.config import ServerArgs
from jaxserve.executor import distributed
from jaxserve.executor.background import BackgroundCompiler, Order
from jaxserve.executor.blueprint import Blueprint, NumPages
from jaxserve.executor.compilation import ProgramCompiler
from jaxserve.executor.expert_record import ExpertRecord
from jaxserve.executor.memory import (
    MemoryBudget,
    ProgramMemory,
    StepMemory,
    measure,
    memory_budget,
    memory_lines,
    weight_bytes,
)
from jaxserve.executor.mesh import make_mesh, select_devices
from jaxserve.executor.model_runner import ModelRunner
from jaxserve.executor.programs import ProgramKey
from jaxserve.executor.step import Params
from jaxserve.executor.warmup import CompileCounter, cache_folder, compile_all, jax_cache
from jaxserve.executor.weights import WeightLoader
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


def build_runner(args: ServerArgs, *, warmup: str = "full", show_progress: bool = True) -> BuiltRunner:
    """Raises ValueError or OSError with a sentence for what a user can mend (options, checkpoint, memory).

    `warmup` as --warmup; early: with the programs that serve anything, and `Runner.tend` takes in the others.
    """
    imports_s = time.time() - psutil.Process().create_time()
    counter = CompileCounter()
    blueprint = draw_blueprint(args)
    builder = _Builder(blueprint, cache_folder(args.compilation_cache_dir), show_progress)
    logger.info("Attention backend: %s, %d tokens per page", blueprint.backend.name, blueprint.page_size)
    early = warmup == "early" or (warmup == "auto" and blueprint.platform == "cpu" and distributed.is_alone())
    programs = blueprint.program_set
    parts = builder.make(programs.essential, programs.for_short_prompts) if early else builder.make(programs.all)
    missing = [key for key in programs.later if key not in parts.compiled]
    # Another process could only leave them in the cache.
    by_process = blueprint.platform == "cpu" and os.access(builder.folder, os.W_OK)
    order = Order(args=args, num_pages=parts.compiler.num_pages) if by_process else None
    runner = ModelRunner(
        program_set=programs,
        compiled=parts.compiled,
        later=BackgroundCompiler(parts.compiler, missing, order) if missing else None,
        params=parts.params,
        mesh=blueprint.mesh,
        spec=blueprint.spec(parts.compiler.num_pages),
        compile_counter=counter,
        loader=builder.loader,
        model_path=args.model_path,
        load_format=args.load_format,
        expert_record=ExpertRecord(blueprint.config.num_layers, blueprint.config.sparse_layers),
        startup_s={"imports": imports_s, **builder.took_s},
    )
    logger.info("KV cache of %d tokens", runner.spec.max_total_tokens)
    return BuiltRunner(runner, blueprint.args, blueprint.config)


def draw_blueprint(args: ServerArgs) -> Blueprint:
    """On this machine's devices, which JAX starts here if it has not yet."""
    select_devices(args.device, args.num_local_devices)
    mesh = make_mesh(args.tp_size, attn_dp_size=args.attn_dp_size, dp_size=args.dp_size)
    return Blueprint.draw(args, ModelConfig.from_pretrained(args.model_path, json.loads(args.json_model_override_args)), mesh)


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
    blueprint, path = draw_blueprint(args), cache_folder(folder)
    return compile_into(path, blueprint, plan_memory(blueprint, path, weights_loaded=False).num_pages)


def compile_into(folder: pathlib.Path, blueprint: Blueprint, num_pages: NumPages) -> Filled:
    """Of all programs; the devices may be elsewhere."""
    counter, keys = CompileCounter(), blueprint.program_set.all
    ProgramCompiler.of(blueprint, num_pages, folder).obtain(keys, show_progress=True)
    return Filled(len(keys), counter.count)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What a runner is put together from."""

    params: Params
    compiler: ProgramCompiler
    compiled: dict[ProgramKey, Any]


@dataclasses.dataclass(frozen=True)
class _Builder:
    blueprint: Blueprint
    folder: pathlib.Path  # of the caches
    show_progress: bool
    took_s: dict[str, float] = dataclasses.field(default_factory=dict)  # seconds of each part; they may overlap

    @functools.cached_property
    def loader(self) -> WeightLoader:
        args, config = self.blueprint.args, self.blueprint.config
        return WeightLoader(
            config=config,
            context_len=args.context_length or config.context_len,
            mesh=self.blueprint.mesh,
            dtype=jnp.dtype(args.dtype),
            model_override_args=args.json_model_override_args,
        )

    def make(self, keys: Sequence[ProgramKey], if_cached: Sequence[ProgramKey] = ()) -> _Parts:
        """With the programs `keys`, and those of `if_cached` that need not be compiled."""
        if self.blueprint.platform != "cpu":
            with jax_cache(self.folder):
                params = self._load_weights()
            compiler = self._compiler(plan_memory(self.blueprint, self.folder, weights_loaded=True))
            return _Parts(params, compiler, self._obtain(compiler, keys, if_cached))
        # Nothing here depends on the weights but by their size: both at once.
        self.loader.check_files(self.blueprint.args.model_path, self.blueprint.args.load_format)
        compiler = self._compiler(plan_memory(self.blueprint, self.folder, weights_loaded=False))
        with concurrent.futures.ThreadPoolExecutor(1, "weights") as thread:
            loading = thread.submit(self._load_weights)
            compiled = self._obtain(compiler, keys, if_cached)
            return _Parts(loading.result(), compiler, compiled)

    def _compiler(self, budget: MemoryBudget) -> ProgramCompiler:
        for line in memory_lines(budget, self.blueprint):
            logger.info("%s", line)
        return ProgramCompiler.of(self.blueprint, budget.num_pages, self.folder)

    def _load_weights(self) -> Params:
        args = self.blueprint.args
        with self._timed("weights"):
            return self.loader.load(args.model_path, args.load_format, progress=self.show_progress)

    def _obtain(
        self, compiler: ProgramCompiler, keys: Sequence[ProgramKey], if_cached: Sequence[ProgramKey]
    ) -> dict[ProgramKey, Any]:
        with self._timed(f"{len(keys)} programs"):
            found = compiler.obtain(keys, show_progress=self.show_progress)
            return found | compiler.load_all(key for key in if_cached if key not in found)

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started_s = time.monotonic()
        yield
        self.took_s[what] = time.monotonic() - started_s
        logger.info("%s: %.1f s", what, self.took_s[what])


def plan_memory(blueprint: Blueprint, folder: pathlib.Path, *, weights_loaded: bool) -> MemoryBudget:
    """Of the device as it is now; `folder` of the cache. Steps are compiled for it only where they decide about the pool."""
    decides = blueprint.platform != "cpu" and blueprint.args.max_total_tokens is None
    device = measure(blueprint.mesh.local_devices[0], blueprint.args.dp_size)
    if not weights_loaded:
        device = dataclasses.replace(device, free=device.free - weight_bytes(blueprint))
    steps = measure_steps(blueprint, folder) if decides else None
    budget = memory_budget(blueprint, device, steps)
    pages = distributed.least(budget.num_pages[0])
    if pages < budget.num_pages[0]:  # another host has less room
        args = blueprint.args.replace(max_total_tokens=pages * blueprint.page_size * blueprint.args.attn_dp_size)
        budget = memory_budget(dataclasses.replace(blueprint, args=args), device, steps)
    distributed.check_alike("model or other options", blueprint.description(budget.num_pages))
    return budget


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
