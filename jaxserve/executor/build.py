"""From ServerArgs to a warm ModelRunner: mesh, config, weights, memory, compilation, in that order."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import time
from typing import Any

import jax.numpy as jnp

from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.memory import MemoryBudget, ProgramMemory, StepMemory, measure, memory_budget, memory_lines
from jaxserve.executor.mesh import make_mesh, select_devices
from jaxserve.executor.model_runner import ModelRunner
from jaxserve.executor.programs import SamplingKey
from jaxserve.executor.warmup import CompileCounter, compile_all, use_compilation_cache
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


def build_runner(args: ServerArgs, *, show_progress: bool = True) -> BuiltRunner:
    """Raises ValueError or OSError with a sentence for what a user can mend (options, checkpoint, memory)."""
    select_devices(args.device, args.tp_size)
    use_compilation_cache(args.compilation_cache_dir)
    counter = CompileCounter()
    mesh = make_mesh(args.tp_size)
    config = ModelConfig.from_pretrained(args.model_path, json.loads(args.json_model_override_args))
    blueprint = Blueprint.draw(args, config, mesh)
    args, config = blueprint.args, blueprint.config
    logger.info("Attention backend: %s, %d tokens per page", blueprint.backend.name, blueprint.page_size)
    started_s = time.monotonic()
    loader = WeightLoader(
        config=config,
        mesh=mesh,
        dtype=jnp.dtype(args.dtype),
        model_override_args=args.json_model_override_args,
        free_bytes=lambda: measure(mesh.devices.flat[0]).free,
    )
    params = loader.load(args.model_path, args.load_format, progress=show_progress)
    logger.info("Weights loaded in %.1f s", time.monotonic() - started_s)
    budget = plan_memory(blueprint)
    logger.info("%s", "\n".join(memory_lines(budget, blueprint)))
    runner = blueprint.runner(budget.num_pages, params, loader, counter)
    started_s = time.monotonic()
    runner.warm_up(show_progress=show_progress)
    logger.info("Compiled in %.1f s; KV cache of %d tokens", time.monotonic() - started_s, runner.spec.max_total_tokens)
    return BuiltRunner(runner, args, config)


def plan_memory(blueprint: Blueprint) -> MemoryBudget:
    """Of the device as it is now, with the weights loaded. Steps are compiled for it only where they decide about the pool."""
    decides = blueprint.platform != "cpu" and blueprint.args.max_total_tokens is None
    device = measure(blueprint.mesh.devices.flat[0])
    return memory_budget(blueprint, device, measure_steps(blueprint) if decides else None)


def measure_steps(blueprint: Blueprint) -> StepMemory:
    """What steps take beside weights and state, learnt by compiling the largest of them with a small pool."""
    num_pages, params, buckets = blueprint.pages_each(_PROBE_PAGES), blueprint.abstract_params(), blueprint.buckets
    programs = blueprint.programs(num_pages)
    lower: dict[Any, Any] = {
        bucket: functools.partial(programs.lower_forward, bucket, params) for bucket in (buckets.extend[-1], buckets.decode[-1])
    }
    lower["sampling"] = functools.partial(programs.lower_sampling, SamplingKey.largest_of(buckets.decode))
    compiled = compile_all(lower, show_progress=False)
    *forward, sampling = [ProgramMemory.of(program.memory_analysis()) for program in compiled.values()]
    return StepMemory.of(blueprint, forward, sampling, num_pages)
