"""What an engine inside a program gives back when its memory is released, and takes again.

    python -m benchmarks.released_memory [--model-path FOLDER] [--tokens 8192]

MiB by three accounts: JAX' arrays, the device's own statistics (a CPU has none) and the process (RSS: on a CPU the devices'
memory, elsewhere what the host keeps). The KV cache has --tokens, and prompts fill it. Default: `medium_model` in float32.
"""

from __future__ import annotations

import argparse
import gc
import pathlib

import jax
import numpy as np
import psutil
from safetensors.numpy import load_file

from benchmarks.medium_model import MEDIUM_QWEN3, write_medium_qwen3
from jaxserve import Engine


def print_mib(state: str) -> None:
    gc.collect()
    statistics = jax.devices()[0].memory_stats() or {}
    accounts = (
        sum(array.nbytes for array in jax.live_arrays()),
        statistics.get("bytes_in_use"),
        psutil.Process().memory_info().rss,
    )
    print(f"| {state} |", " | ".join("-" if one is None else f"{one / 2**20:.0f}" for one in accounts), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", type=pathlib.Path, default=MEDIUM_QWEN3)
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    folder = args.model_path if args.model_path != MEDIUM_QWEN3 else write_medium_qwen3(MEDIUM_QWEN3)
    jax.devices()  # what JAX itself takes was there before
    print("| | arrays | device | RSS |\n|---|--:|--:|--:|")
    print_mib("before there is an engine")
    with Engine(str(folder), in_process=True, devices=jax.devices()[:1], max_total_tokens=args.tokens) as engine:
        prompts = list(np.random.default_rng(0).integers(3, 2000, (8, args.tokens // 8 - 32)))
        sampling = {"max_new_tokens": 16, "ignore_eos": True}
        engine.rollout(input_ids=prompts, sampling_params=sampling)
        print_mib("after a batch")
        engine.release_memory_occupation(tags=["kv_cache"])
        print_mib("KV cache released")
        engine.release_memory_occupation(tags=["weights"])
        print_mib("weights released, too")
        given = {name: jax.device_put(array) for name, array in load_file(folder / "model.safetensors").items()}
        print_mib("and the trainer has its own")
        engine.update_weights(given)
        print_mib("which the engine has copies of")
        del given
        engine.resume_memory_occupation(tags=["kv_cache"])
        engine.rollout(input_ids=prompts, sampling_params=sampling)
        print_mib("KV cache resumed, a batch, the trainer's gone")
    print_mib("the engine has ended")


if __name__ == "__main__":
    main()
