"""Programs of a server on devices that are elsewhere, compiled here into a cache folder that is then carried there.

The server takes those whose key it computes itself: same source, model and options, same versions, flags and devices
(executor/environment.py). All else it compiles as always, so a folder that does not match costs nothing and changes nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os

from jaxserve.aot.targets import Target, without_devices
from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.build import Filled, compile_into
from jaxserve.executor.memory import GIB, DeviceMemory, memory_budget, weight_bytes
from jaxserve.executor.mesh import make_mesh, select_devices
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
    select_devices(args.device, args.tp_size)
    without_devices()
    if target.chip.platform == "tpu":
        _as_beside_tpus()
    config = ModelConfig.from_pretrained(args.model_path, json.loads(args.json_model_override_args))
    blueprint = Blueprint.draw(args, config, make_mesh(args.tp_size, list(target.devices()), attn_dp_size=args.attn_dp_size))
    memory = target.chip.hbm_bytes
    budget = memory_budget(blueprint, DeviceMemory(memory, memory - weight_bytes(blueprint)), None)
    if budget.free < 0:
        raise ValueError(
            f"{-budget.free / GIB:.2f} GiB are missing on each device for the weights and a KV cache of --max-total-tokens "
            f"{args.max_total_tokens}."
        )
    return compile_into(cache_folder(folder), [blueprint], budget.num_pages)


def _check(target: Target, args: ServerArgs) -> None:
    if args.tp_size > target.num_devices:
        raise ValueError(f"--tp-size {args.tp_size} needs as many devices; {target.name} has {target.num_devices}.")
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
