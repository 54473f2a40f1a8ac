"""From ServerArgs to a warm ModelRunner: mesh, config, weights, memory, compilation, in that order."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import logging
import pathlib
import time
from typing import Any

import jax.numpy as jnp

from jaxserve.config import ServerArgs
from jaxserve.executor.background import BackgroundCompiler, Order
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.compilation import ProgramCompiler
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
from jaxserve.executor.programs import ProgramKey, SamplingKey
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
    select_devices(args.device, args.tp_size)
    folder = cache_folder(args.compilation_cache_dir)
    counter = CompileCounter()
    mesh = make_mesh(args.tp_size)
    config = ModelConfig.from_pretrained(args.model_path, json.loads(args.json_model_override_args))
    asked, blueprint = args, Blueprint.draw(args, config, mesh)
    args, config = blueprint.args, blueprint.config
    logger.info("Attention backend: %s, %d tokens per page", blueprint.backend.name, blueprint.page_size)
    loader = WeightLoader(
        config=config,
        context_len=args.context_length or config.context_len,
        mesh=mesh,
        dtype=jnp.dtype(args.dtype),
        model_override_args=args.json_model_override_args,
    )
    load = functools.partial(_load_weights, loader, args, show_progress)
    program_set = blueprint.program_set
    early = warmup == "early" or (warmup == "auto" and blueprint.platform == "cpu")
    keys = program_set.essential if early else program_set.all

    def obtain(budget: MemoryBudget) -> tuple[ProgramCompiler, dict[ProgramKey, Any]]:
        logger.info("%s", "\n".join(memory_lines(budget, blueprint)))
        started_s = time.monotonic()
        compiler = ProgramCompiler.of(blueprint, budget.num_pages, folder)
        compiled = compiler.obtain(keys, show_progress=show_progress)
        logger.info("%d of %d programs after %.1f s", len(keys), len(program_set.all), time.monotonic() - started_s)
        return compiler, compiled

    if blueprint.platform == "cpu":
        # Nothing that is decided here depends on the weights but their size: both at once.
        loader.check_files(args.model_path, args.load_format)
        budget = plan_memory(blueprint, folder, weights_loaded=False)
        with concurrent.futures.ThreadPoolExecutor(1, "weights") as thread:
            loading = thread.submit(load)
            compiler, compiled = obtain(budget)
            params = loading.result()
    else:
        with jax_cache(folder):
            params = load()
        budget = plan_memory(blueprint, folder, weights_loaded=True)
        compiler, compiled = obtain(budget)
    missing = [key for key in program_set.later if key not in compiled]
    order = Order(args=asked, num_pages=budget.num_pages) if blueprint.platform == "cpu" else None
    runner = ModelRunner(
        program_set=program_set,
        compiled=compiled,
        later=BackgroundCompiler(compiler, missing, order) if missing else None,
        params=params,
        mesh=mesh,
        spec=blueprint.spec(budget.num_pages),
        compile_counter=counter,
        loader=loader,
        model_path=args.model_path,
        load_format=args.load_format,
    )
    logger.info("KV cache of %d tokens", runner.spec.max_total_tokens)
    return BuiltRunner(runner, args, config)


def _load_weights(loader: WeightLoader, args: ServerArgs, show_progress: bool) -> Params:
    started_s = time.monotonic()
    params = loader.load(args.model_path, args.load_format, progress=show_progress)
    logger.info("Weights loaded in %.1f s", time.monotonic() - started_s)
    return params


def plan_memory(blueprint: Blueprint, folder: pathlib.Path, *, weights_loaded: bool) -> MemoryBudget:
    """Of the device as it is now; `folder` of the cache. Steps are compiled for it only where they decide about the pool."""
    decides = blueprint.platform != "cpu" and blueprint.args.max_total_tokens is None
    device = measure(blueprint.mesh.devices.flat[0])
    if not weights_loaded:
        device = dataclasses.replace(device, free=device.free - weight_bytes(blueprint))
    return memory_budget(blueprint, device, measure_steps(blueprint, folder) if decides else None)


def measure_steps(blueprint: Blueprint, folder: pathlib.Path | None = None) -> StepMemory:
    """What steps take beside weights and state, learnt by compiling the largest of them with a small pool, or from the cache in
    `folder`."""
    num_pages, buckets = blueprint.pages_each(_PROBE_PAGES), blueprint.buckets
    keys = (buckets.extend[-1], buckets.decode[-1], SamplingKey.largest_of(buckets.decode))
    if folder is not None:
        compiled = ProgramCompiler.of(blueprint, num_pages, folder).obtain(keys, show_progress=False)
    else:
        programs, params = blueprint.programs(num_pages), blueprint.abstract_params()
        compiled = compile_all({key: functools.partial(programs.lower, key, params) for key in keys}, show_progress=False)
    *forward, sampling = [ProgramMemory.of(compiled[key].memory_analysis()) for key in keys]
    return StepMemory.of(blueprint, forward, sampling, num_pages)
