"""From ServerArgs to a warm ModelRunner: mesh, config, weights, memory, compilation, in that order."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from typing import Any

import jax.numpy as jnp

from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.memory import CPU_POOL_LIMIT_BYTES, fit_pages, limit_to_use, measure
from jaxserve.executor.mesh import make_mesh, select_devices
from jaxserve.executor.model_runner import ModelRunner
from jaxserve.executor.programs import SamplingKey
from jaxserve.executor.warmup import CompileCounter, use_compilation_cache
from jaxserve.models import ModelConfig, load_params

logger = logging.getLogger(__name__)

# Pages of the pool that the largest step is compiled with to learn what its temporaries take.
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
    params = load_params(
        args.model_path, config, mesh, jnp.dtype(args.dtype), load_format=args.load_format, progress=show_progress
    )
    logger.info("Weights loaded in %.1f s", time.monotonic() - started_s)
    runner = blueprint.runner(choose_num_pages(blueprint), params, counter)
    started_s = time.monotonic()
    runner.warm_up(show_progress=show_progress)
    logger.info("Compiled in %.1f s; KV cache of %d tokens", time.monotonic() - started_s, runner.spec.max_total_tokens)
    return BuiltRunner(runner, args, config)


def choose_num_pages(blueprint: Blueprint) -> int:
    """Pages per layer: as asked for, or as many as the device has room for now that the weights are loaded."""
    args = blueprint.args
    if args.max_total_tokens is not None:
        return max(args.max_total_tokens // blueprint.page_size, 1)
    assert args.mem_fraction_static and args.max_running_requests
    on_cpu = blueprint.platform == "cpu"
    pages = fit_pages(
        measure(blueprint.mesh.devices.flat[0]),
        mem_fraction=args.mem_fraction_static,
        temp_bytes=0 if on_cpu else step_temp_bytes(blueprint),
        page_bytes=blueprint.page_bytes,
        page_size=blueprint.page_size,
    )
    return limit_to_use(
        pages,
        page_bytes=blueprint.page_bytes,
        max_rows=args.max_running_requests,
        max_pages_per_row=blueprint.spec(1).max_pages_per_row,
        cap_bytes=CPU_POOL_LIMIT_BYTES if on_cpu else None,
    )


def step_temp_bytes(blueprint: Blueprint) -> int:
    """What the largest step takes beside weights and state, learnt by compiling its two halves with a small pool."""
    programs = blueprint.programs(_PROBE_PAGES)
    largest = max(blueprint.buckets.all, key=lambda bucket: (bucket.num_tokens, bucket.num_rows))
    forward = programs.lower_forward(largest, blueprint.abstract_params())
    sampling = programs.lower_sampling(SamplingKey.largest_of(blueprint.buckets.all))
    return max(_extra_bytes(lowered.compile().memory_analysis()) for lowered in (forward, sampling))


def _extra_bytes(analysis: Any) -> int:
    """Temporaries, and outputs that are not updated inputs (the logits)."""
    if analysis is None:
        return 0
    return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
