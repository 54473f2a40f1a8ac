"""Programs of a server on devices that are elsewhere, compiled here into a cache folder that is then carried there.

The server takes those whose key it computes itself: same source, model and options, same versions, flags and devices
(executor/environment.py). All else it compiles as always, so a folder that does not match costs nothing and changes nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence

from jaxserve.aot.targets import Target, without_devices
from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint, NumPages
from jaxserve.executor.build import Filled, compile_into
from jaxserve.executor.memory import GIB, DeviceMemory, alike_budgets, weight_bytes
from jaxserve.executor.mesh import make_meshes, select_devices
from jaxserve.executor.warmup import cache_folder
from jaxserve.models import ModelConfig

# What is printed of programs for a GPU.
NOT_TIMED = (
    "XLA chooses among algorithms of a matmul by timing them on the GPU. These programs have cuBLASLt's first choice instead, "
    "which may be slower: to have them timed, let a server on the GPU compile."
)


def fill_cache_for(target: Target, args: ServerArgs, folder: str) -> Filled:
    """Puts all programs of a server with these options on the target into `folder`, its --compilation-cache-dir there.

    ValueError, RuntimeError or OSError with a sentence for what cannot be or is not installed.
    """
    _check(target, args)
    select_devices(args.device, args.num_devices)
    without_devices()
    if target.chip.platform == "tpu":
        _as_beside_tpus()
    overrides = json.loads(args.json_model_override_args)
    config = ModelConfig.from_pretrained(args.model_path, overrides, is_embedding=args.is_embedding)
    meshes = make_meshes(args.pp_size, args.tp_size, list(target.devices()), attn_dp_size=args.attn_dp_size)
    blueprints = Blueprint.draw_stages(args, config, meshes)
    return compile_into(cache_folder(folder), blueprints, _num_pages(blueprints, target))


def _num_pages(blueprints: Sequence[Blueprint], target: Target) -> NumPages:
    """Of the pools. ValueError if they do not fit beside the weights."""
    memory = target.chip.hbm_bytes
    budgets = alike_budgets(
        [(blueprint, DeviceMemory(memory, memory - weight_bytes(blueprint)), None) for blueprint in blueprints]
    )
    free = min(budget.free for budget in budgets)
    if free < 0:
        raise ValueError(
            f"{-free / GIB:.2f} GiB are missing on each device for the weights and a KV cache of --max-total-tokens "
            f"{blueprints[0].args.max_total_tokens}."
        )
    return budgets[0].num_pages


def _check(target: Target, args: ServerArgs) -> None:
    target.check(args.pp_size, args.tp_size)
    if target.num_hosts > 1:
        raise ValueError(f"{target.name} spans {target.num_hosts} hosts; `jaxserve serve` runs on those of one today.")
    if args.max_total_tokens is None:
        raise ValueError(
            "Programs for devices that are elsewhere need --max-total-tokens, here and of the server: without it the KV cache "
            "follows from the memory that the server finds free, and every program from the KV cache. `jaxserve compile` "
            "without --cache-dir says what fits."
        )
    if target.chip.platform != "gpu":
        return
    if args.quantization is not None:
        raise ValueError(
            f"--quantization {args.quantization} has matmuls that XLA writes itself on a GPU, as fast as the tiles that it "
            "finds by timing them there. Let the server compile."
        )
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        # The target is described with a driver for CUDA 13: an older one would be asked for what it lacks.
        raise RuntimeError(f"Programs for {target.name} need CUDA 13: pip install 'jax[cuda13]' (no GPU is needed here).")


def _as_beside_tpus() -> None:
    """Adds, before libtpu is loaded, what JAX adds to libtpu's flags and its own options where there are TPUs: they are in a
    program's key."""
    from jax._src.cloud_tpu_init import cloud_tpu_init

    os.environ.setdefault("JAX_FORCE_TPU_INIT", "1")
    cloud_tpu_init()
