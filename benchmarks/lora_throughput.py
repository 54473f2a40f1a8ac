"""What LoRA costs: requests with eight adapters, and with none, against a server without adapters.

    python -m benchmarks.lora_throughput [--model-path demo] [--rounds 5] [--requests 128] [--input-len 64] [--output-len 64]

Two engines in turns, with the same requests in each round: one without LoRA, one with eight adapters of ranks 4 to 16 on all
linear modules of the layers, which serves them once without an adapter and once with a random one of the eight for each.
Prints tokens per second, prompt and output, of each: medians over the rounds, and of their ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxserve import Engine
from jaxserve.demo import demo_model_path
from jaxserve.models import ModelConfig, abstract_params
from jaxserve.models.adapters.layout import ALL_MODULES, AdapterLayout

RANKS = (4, 4, 8, 8, 8, 16, 16, 16)


def write_adapter(folder: Path, modules: dict[str, tuple[int, int]], rank: int, seed: int) -> Path:
    """An adapter of PEFT's format that changes these modules, name -> (out, in), a little."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, (size_out, size_in) in modules.items():
        for part, shape in (("A", (rank, size_in)), ("B", (size_out, rank))):
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = rng.normal(0, 0.02, shape).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_adapters(folder: Path, model_path: str) -> list[str]:
    """Eight, as --lora-paths takes them."""
    arrays = abstract_params(ModelConfig.from_pretrained(model_path), np.float32, 1)
    layout = AdapterLayout.of(arrays, num_slots=1, rank=1, dtype=np.float32, targets=(ALL_MODULES,))
    return [f"a{i}={write_adapter(folder / str(i), layout.modules, rank, i)}" for i, rank in enumerate(RANKS)]


def throughput(engine: Engine, prompts: list[list[int]], output_len: int, names: list[str | None] | None) -> float:
    params = {"temperature": 0.0, "max_new_tokens": output_len, "ignore_eos": True}
    fields: dict[str, Any] = {} if names is None else {"lora_path": names}
    began_s = time.perf_counter()
    replies = engine.generate(input_ids=prompts, sampling_params=params, **fields)
    took_s = time.perf_counter() - began_s
    assert isinstance(replies, list) and len(replies) == len(prompts)
    return sum(len(prompt) + output_len for prompt in prompts) / took_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    args = parser.parse_args()
    model_path = demo_model_path() if args.model_path == "demo" else args.model_path
    vocab_size = ModelConfig.from_pretrained(model_path).vocab_size
    with tempfile.TemporaryDirectory() as folder:
        paths = write_adapters(Path(folder), model_path)
        options: dict[str, Any] = {
            "model_path": model_path,
            "disable_radix_cache": True,
            "warmup": "full",
            "log_level": "error",
        }
        with Engine(**options) as plain, Engine(**options, lora_paths=paths) as adapted:
            runs: dict[str, list[float]] = {"without LoRA": [], "LoRA, no adapter asked for": [], "LoRA, 8 adapters": []}
            for seed in range(-1, args.rounds):  # the first warms up
                rng = np.random.default_rng(seed + 1)
                prompts = rng.integers(3, vocab_size - 16, (args.requests, args.input_len)).tolist()
                names: list[str | None] = [f"a{i}" for i in rng.integers(0, len(RANKS), args.requests)]
                ways: dict[str, tuple[Engine, list[str | None] | None]] = {
                    "without LoRA": (plain, None),
                    "LoRA, no adapter asked for": (adapted, None),
                    "LoRA, 8 adapters": (adapted, names),
                }
                for name in rng.permutation(list(ways)).tolist():  # none has the quieter place in each round
                    engine, asked = ways[name]
                    value = throughput(engine, prompts, args.output_len, asked)
                    if seed >= 0:
                        runs[name].append(value)
                    print(f"round {seed}: {name:28}{value:10.0f} tokens/s", flush=True)
    base = runs["without LoRA"]
    print(f"\n{args.requests} requests of {args.input_len} + {args.output_len} tokens, medians of {args.rounds} rounds")
    for name, values in runs.items():
        ratio = statistics.median(value / one for value, one in zip(values, base, strict=True))
        print(f"{name:28}{statistics.median(values):10.0f} tokens/s{ratio:8.3f}")


if __name__ == "__main__":
    main()
