"""Writes jaxserve/models/families/tested.json and the tables of docs/models.md, from the families, their tests and the kernels:
`python scripts/document_models.py`. Needs what the tests need."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from checkpoints import ORACLE, make_checkpoint  # noqa: E402
from model_families import CASES, ENCODERS, IN_PROCESS, LIVE  # noqa: E402

from benchmarks import model_configs as published  # noqa: E402
from jaxserve.aot.footprint import Footprint  # noqa: E402
from jaxserve.kernels.api import AttentionSpec, Chip, choose_backend, choose_latent_backend  # noqa: E402
from jaxserve.kernels.pallas.gpu import attention as gpu_attention  # noqa: E402
from jaxserve.models import ModelConfig, MoESpec, families  # noqa: E402

TESTED = ROOT / "jaxserve" / "models" / "families" / "tested.json"
PAGE = ROOT / "docs" / "models.md"
MARK = "<!-- From here on: scripts/document_models.py -->\n"
ALL_CASES = {**CASES, **ENCODERS}
CHIPS = {
    "GPU": Chip("gpu", "NVIDIA H200", (9, 0), 132),
    "TPU": Chip("tpu", "TPU v6 lite"),
    "CPU": Chip("cpu", "cpu"),
}
# Tests have tiny heads; kernels are asked about those that are usual.
USUAL_HEADS: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
USUAL_LATENTS: dict[str, Any] = {"num_heads": 32, "head_dim": 576, "latent_dim": 512}
# Whose cache and weights the page shows.
SHOWN = {
    "Llama-3.1-8B": published.LLAMA_8B,
    "Llama-3.1-70B": published.LLAMA_70B,
    "Phi-4": published.PHI_4,
    "Qwen3-32B": published.QWEN3_32B,
    "Gemma-2-9B": published.GEMMA_2_9B,
    "Gemma-3-27B": published.GEMMA_3_27B,
    "Qwen3-30B-A3B": published.QWEN3_30B_A3B,
    "Qwen3-235B-A22B": published.QWEN3_235B_A22B,
    "gpt-oss-120b": published.GPT_OSS_120B,
    "Qwen3-Next-80B-A3B": published.QWEN3_NEXT_80B_A3B,
    "GLM-4.5": published.GLM_4_5,
    "Llama-4-Scout": published.LLAMA_4_SCOUT,
    "DeepSeek-V3": published.DEEPSEEK_V3,
}


def catalogue(checkpoint: Callable[[str], Path]) -> dict[str, dict[str, Any]]:
    """What tested.json holds; `checkpoint` gives the folder of a case."""
    cases: dict[str, list[str]] = {}
    for name in ALL_CASES:
        cases.setdefault(_raw(checkpoint(name))["architectures"][0], []).append(name)
    return {
        family.architecture: _entry(family.read.__module__.rpartition(".")[2], cases[family.architecture], checkpoint)
        for family in families()
        if family.architecture in cases
    }


def tested_text(entries: dict[str, dict[str, Any]]) -> str:
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    return f"{{\n{lines}\n}}\n"


def _entry(file: str, names: list[str], checkpoint: Callable[[str], Path]) -> dict[str, Any]:
    folders = [checkpoint(name) for name in names]
    configs = [ModelConfig.from_pretrained(folder) for folder in folders]
    is_rewritten = all(ALL_CASES[name].rewrite is not None for name in names)
    oracle = folders[0] / ORACLE if is_rewritten else folders[0]
    return {
        "file": file,
        "oracle": _raw(oracle)["architectures"][0],
        "is_rewritten": is_rewritten,
        "served": [
            how for how, served in (("server", LIVE), ("scheduler", IN_PROCESS)) if any(one.case in names for one in served)
        ]
        or ["logits" if configs[0].generates else "hidden states"],
        "made_of": sorted({word for config in configs for word in _parts(config)}),
        "kernels": {platform: _kernel(configs, chip) for platform, chip in CHIPS.items()},
        "keys": sorted({key for folder in folders for key in _raw(folder)} - _common_keys()),
    }


def _raw(folder: Path) -> dict[str, Any]:
    raw = json.loads((folder / "config.json").read_text())
    return {**(raw.get("text_config") or {}), **raw}


def _common_keys() -> set[str]:
    import transformers

    return set(transformers.PretrainedConfig().to_dict())


def _parts(config: ModelConfig) -> Iterator[str]:
    for layer in config.layers:
        for part in (layer.mixer, layer.mlp):
            yield type(part).__name__.removesuffix("Spec")
        if isinstance(layer.mlp, MoESpec) and layer.mlp.shared is not None:
            yield "shared experts"
        if getattr(layer.mixer, "window", None) is not None:
            yield "chunks" if layer.mixer.is_chunked else "windows"
    if config.uses_soft_cap:
        yield "soft caps"
    if config.uses_sinks:
        yield "sinks"


def _kernel(configs: list[ModelConfig], chip: Chip) -> str:
    """The backend that serves all of them."""
    names = set()
    for config in configs:
        spec = AttentionSpec.of(config, chip=chip, tp_size=1, dtype="float32" if chip.platform == "cpu" else "bfloat16")
        usual = USUAL_HEADS if spec.latent_dim is None else USUAL_LATENTS
        choose = choose_backend if spec.latent_dim is None else choose_latent_backend
        with mock.patch.object(gpu_attention, "OLDEST_JAX", (0,)):  # it is asked about the chip, not about this JAX
            names.add(choose("auto", dataclasses.replace(spec, **usual)).name)
    return "reference" if "reference" in names else names.pop()


def page_tables(entries: dict[str, dict[str, Any]]) -> str:
    platforms = "".join(f" {platform} |" for platform in CHIPS)
    lines = [
        "## Architectures", "",
        f"| architecture | file | like Transformers' | compared by | made of |{platforms}",
        f"|---|---|---|---|---|{'---|' * len(CHIPS)}",
    ]  # fmt: skip
    for name, entry in entries.items():
        oracle = f"{entry['oracle']}, rewritten" if entry["is_rewritten"] else entry["oracle"]
        cells = [
            name,
            entry["file"],
            oracle,
            ", ".join(entry["served"]),
            ", ".join(entry["made_of"]),
            *entry["kernels"].values(),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "", "## What a token takes", "",
        "Bytes of the KV cache for each token, in bfloat16 and on all devices together: layers x 2 x KV heads x head_dim x 2,",
        "of latents layers x (kv_lora_rank + qk_rope_head_dim) x 2. Layers with a window stand apart: they keep no more tokens",
        "than it has. With tensor parallelism a KV head that is kept on several devices counts for each, and so do latents.",
        "Layers that keep a state count for nothing here; a state takes, once for each request, layers x (value heads x key",
        "dim x value dim x 4 + (conv size - 1) x channels x 2).",
        "Parameters and weights are those that are loaded, in bfloat16; configs as published, typed from memory",
        "(`benchmarks/model_configs.py`).", "",
        "| model | layers | KV bytes per token | state bytes per request | parameters | weights |",
        "|---|--:|---|--:|--:|--:|",
    ]  # fmt: skip
    lines += [_shown(name, raw) for name, raw in SHOWN.items()]
    return "\n".join(lines) + "\n"


def _shown(name: str, raw: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig.from_pretrained(published.write_config(Path(folder), raw))
    found = Footprint.of(config, "bfloat16")
    groups = "; ".join(
        f"{size:,}" if window is None else f"{size:,} of the last {window:,}" for window, size in found.kv_token_bytes.items()
    )
    states = f"{found.state_bytes:,}" if found.state_bytes else ""
    weights = f"{found.parameters / 1e9:.1f}B | {found.weight_bytes / 2**30:.1f} GiB"
    return f"| {name} | {config.num_layers} | {groups} | {states} | {weights} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made: dict[str, Path] = {}

        def checkpoint(name: str) -> Path:
            if name not in made:
                made[name] = make_checkpoint(name, Path(folder) / name)
            return made[name]

        entries = catalogue(checkpoint)
    TESTED.write_text(tested_text(entries))
    head = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(f"{head}{MARK}\n{page_tables(entries)}")


if __name__ == "__main__":
    main()
