"""Shapes of models that are planned for, and a target made of this machine's CPU devices."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from jaxserve.aot.chips import V6E
from jaxserve.aot.targets import Target
from jaxserve.models import ModelConfig

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
LLAMA_8B = {
    **_LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}
LLAMA_70B = {
    **_LLAMA,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 64,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
TINY = {
    **_LLAMA,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


def write_config(folder: Path, raw: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def config_of(folder: Path, raw: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_pretrained(write_config(folder, raw))


class CpuTarget(Target):
    """A target whose compiler is always there."""

    def devices(self) -> tuple[Any, ...]:
        return tuple(jax.devices("cpu")[: self.num_devices])


def cpu_target(num_devices: int, hbm_bytes: int) -> CpuTarget:
    chip = dataclasses.replace(V6E, name="pretended", kind="cpu", platform="cpu", hbm_bytes=hbm_bytes)
    return CpuTarget(chip, (num_devices,))
