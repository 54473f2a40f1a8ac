"""A tiny model to plan for, and a target made of this machine's CPU devices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from benchmarks.model_configs import LLAMA_8B, write_config
from jaxserve.aot.chips import V6E
from jaxserve.aot.targets import Target
from jaxserve.models import ModelConfig

TINY = {
    **LLAMA_8B,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}

# Rows of 24: latents of 16 and rotated keys of 8.
TINY_LATENT = {
    **{name: value for name, value in TINY.items() if name != "head_dim"},
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def config_of(folder: Path, raw: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_pretrained(write_config(folder, raw))


class CpuTarget(Target):
    """A target whose compiler is always there."""

    def devices(self) -> tuple[Any, ...]:
        return tuple(jax.devices("cpu")[: self.num_devices])


def cpu_target(num_devices: int, hbm_bytes: int) -> CpuTarget:
    chip = dataclasses.replace(V6E, name="pretended", kind="cpu", platform="cpu", hbm_bytes=hbm_bytes)
    return CpuTarget(chip, (num_devices,))
