"""A Qwen3 of 129M parameters with random weights: large enough that a step is arithmetic, small enough for two cores.

    python -m benchmarks.medium_model FOLDER

A Hugging Face folder in float32, the same for the same seed, with the demo model's tokenizer. Its words are noise.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil

import numpy as np
from safetensors.numpy import save_file

from jaxserve.demo import demo_model_path

# Where benchmarks keep it.
MEDIUM_QWEN3 = pathlib.Path.home() / ".cache/jaxserve/medium-qwen3"

HIDDEN, LAYERS, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 896, 12, 2432, 14, 2, 64, 32000
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": 2041,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def shapes() -> dict[str, tuple[int, ...]]:
    """Tensor -> shape, in checkpoint names."""
    layer = {
        "input_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.gate_proj.weight": (MLP, HIDDEN),
        "mlp.up_proj.weight": (MLP, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, MLP),
    }
    layers = {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    return {"model.embed_tokens.weight": (VOCAB, HIDDEN), **layers, "model.norm.weight": (HIDDEN,)}


def write_medium_qwen3(folder: pathlib.Path, seed: int = 0) -> pathlib.Path:
    """A servable folder; what is already there is kept."""
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in TOKENIZER_FILES:
        shutil.copy(pathlib.Path(demo_model_path()) / name, folder)
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes().items():
        is_norm = len(shape) == 1
        tensors[name] = np.ones(shape, np.float32) if is_norm else rng.normal(0, 0.03, shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    folder = write_medium_qwen3(parser.parse_args().folder)
    count = sum(int(np.prod(shape)) for shape in shapes().values())
    print(f"{folder}: {count / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
