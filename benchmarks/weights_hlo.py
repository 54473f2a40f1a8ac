"""What a decode step does with its weights: compiled for chips that are not there, nothing is run.

    .venv-aot/bin/python -m benchmarks.weights_hlo [--model llama-8b] [--quantization int8wo] [h200 v6e:1x1 tpu7x:1x1x1]

It needs the compiler of the target (pip install 'jax[tpu]' or 'jax[cuda13]'), no device. Two layers, one device. Printed
are the kinds of weights that the program takes, and every array of at least a weight's elements that it writes to memory: of a
quantized model there must be none but the KV cache and the logits.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import jax

from benchmarks.model_configs import LLAMA_8B, QWEN3_30B_A3B, QWEN3_32B, write_config
from jaxserve.aot import targets
from jaxserve.config import QUANTIZATIONS, ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.forward_batch import Bucket
from jaxserve.executor.mesh import make_mesh
from jaxserve.models import ModelConfig

MODELS: dict[str, dict[str, Any]] = {"llama-8b": LLAMA_8B, "qwen3-32b": QWEN3_32B, "qwen3-30b-a3b": QWEN3_30B_A3B}
NUM_PAGES = 64
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (\w+)\[([\d,]+)\](\{[^ ]*)? ([\w-]+)\(")
_VIEWS = ("parameter", "bitcast", "get-tuple-element", "copy-done")


def blueprint_of(target: targets.Target, raw: dict[str, Any], args: ServerArgs) -> Blueprint:
    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig.from_pretrained(write_config(Path(folder), {**raw, "num_hidden_layers": 2}))
    return Blueprint.draw(args, config, make_mesh(1, list(target.devices())))


def compile_step(blueprint: Blueprint, bucket: Bucket) -> tuple[str, Any]:
    """HLO and memory analysis."""
    options = {"xla_gpu_autotune_level": "0"} if blueprint.platform == "gpu" else None  # autotuning needs the device
    compiled = blueprint.lower(bucket, blueprint.pages_each(NUM_PAGES)).compile(compiler_options=options)
    return compiled.as_text(), compiled.memory_analysis()


def written_out(hlo: str, elements: int) -> list[str]:
    """Instructions outside of fusions whose result has at least so many elements and is in the device's main memory."""
    found, fused = [], False
    for line in hlo.splitlines():
        if line.endswith("{"):  # a computation begins; those of fusions and their parts make no arrays of their own
            fused = not (line.startswith("ENTRY") or "command_buffer" in line or "while" in line)
        made = _INSTRUCTION.match(line)
        if made is None or fused:
            continue
        name, dtype, shape, layout, opcode = made.groups()
        if opcode not in _VIEWS and "S(1)" not in (layout or "") and math.prod(map(int, shape.split(","))) >= elements:
            found.append(f"{dtype}[{shape}] by {opcode} {name}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topologies", nargs="*", default=["h200", "v6e:1x1", "tpu7x:1x1x1"])
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, help="compile a prefill step of so many tokens instead")
    parser.add_argument("--dump", type=Path, help="folder for the compiled HLO")
    options = parser.parse_args()
    targets.without_devices()
    args = ServerArgs(
        model_path="model",
        dtype="bfloat16",
        quantization=options.quantization,
        context_length=4096,
        max_running_requests=options.rows,
        decode_row_buckets=(options.rows,),
        prefill_token_buckets=(options.tokens or 1024,),
    )
    for topology in options.topologies:
        blueprint = blueprint_of(targets.parse_target(topology), MODELS[options.model], args)
        bucket = (blueprint.buckets.extend if options.tokens else blueprint.buckets.decode)[-1]
        hlo, memory = compile_step(blueprint, bucket)
        infos = jax.tree.leaves(blueprint.arrays["layers"])
        matrices = [info for info in infos if len(info.shape) > 1]
        print(f"{topology} {options.model} {options.quantization} {bucket.name}")
        print("  weights:", ", ".join(dict.fromkeys(f"{info.dtype}{list(info.shape)}" for info in matrices)))
        smallest = min(math.prod(info.shape[-2:]) for info in matrices if info.shape[-1] > 512)
        print("  temporaries, MB:", round(memory.temp_size_in_bytes / 1e6, 1))
        for line in written_out(hlo, smallest):
            print("  written:", line)
        if options.dump:
            options.dump.mkdir(parents=True, exist_ok=True)
            name = f"{topology}_{options.model}_{options.quantization}_{bucket.name}"
            (options.dump / (re.sub(r"\W+", "_", name) + ".txt")).write_text(hlo)


if __name__ == "__main__":
    main()
