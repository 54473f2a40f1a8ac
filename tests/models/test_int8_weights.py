"""int8 weights: logits against Transformers with the same rounding applied to its weights, every way of loading, memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import load_model
from dense_model import logits_of, mesh_of, prompt

from jaxserve.models import ModelConfig, convert, load_params
from jaxserve.models.quantized_weight import int8_scales, int8_values

CheckpointOf = Callable[[str], Path]


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.from_pretrained(folder).replace(quantization="int8wo")


def load(folder: Path, tp_size: int, load_format: str = "auto", dtype: Any = jnp.float32) -> Any:
    return load_params(folder, config_of(folder), mesh_of(tp_size), dtype, load_format, progress=False)


def rounded_oracle_logits(folder: Path, token_ids: list[int]) -> np.ndarray:
    """Transformers' answer with every projection's weight [..., out, in] rounded; the embedding, tied or not, stays."""
    import torch

    model = load_model(folder)
    shared = {id(model.get_input_embeddings().weight)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2 or id(weight) in shared or name.endswith("mlp.gate.weight"):
                continue
            scales = weight.abs().amax(dim=-1, keepdim=True) / 127
            weight.copy_(torch.round(weight / scales) * scales)
        return model(torch.tensor([token_ids])).logits[0].numpy()


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", ["llama-biases", "mistral", "qwen2", "qwen3", "qwen3-moe", "glm4"])
def test_logits_equal_those_of_transformers_with_rounded_weights(name: str, tp_size: int, checkpoint: CheckpointOf) -> None:
    folder = checkpoint(name)
    ids = prompt(24, 500)
    logits = logits_of(load(folder, tp_size), config_of(folder), ids, tp_size)
    np.testing.assert_allclose(logits, rounded_oracle_logits(folder, ids), atol=2e-4, rtol=0)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_every_way_of_loading_gives_the_same_weights(tp_size: int, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    folder = checkpoint("llama")
    params = load(folder, tp_size)
    restored = load(convert(folder, tmp_path / "converted", progress=False), tp_size)
    jax.tree.map(np.testing.assert_array_equal, restored, params)
    held = params["layers"][1]["attn"]["o"]
    assert held.values.dtype == jnp.int8 and held.scales.dtype == jnp.float32
    assert held.values.addressable_shards[0].data.shape == (64 // tp_size, 64)
    assert held.scales.addressable_shards[0].data.shape == (64,), "a channel's scale is that of all its rows, on every shard"


@pytest.mark.parametrize("tp_size", [1, 4])
def test_dummy_weights_are_those_of_the_plain_model_rounded(tp_size: int, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    shutil.copy(checkpoint("mistral") / "config.json", tmp_path)
    params = load(tmp_path, tp_size, "dummy")
    plain = load_params(tmp_path, ModelConfig.from_pretrained(tmp_path), mesh_of(tp_size), jnp.float32, "dummy", progress=False)
    for held, matrix in (
        (params["lm_head"], plain["lm_head"].matrix),  # padded with zeros for 4 devices
        (params["layers"][0]["attn"]["qkv"], plain["layers"][0]["attn"]["qkv"].matrix),
        (params["layers"][0]["mlp"]["down"], plain["layers"][0]["mlp"]["down"].matrix),
    ):
        error = np.abs(held.values * held.scales - np.asarray(matrix))
        assert np.all(error <= np.asarray(held.scales) * 0.5001)


def test_rounding() -> None:
    matrix = jnp.asarray([[-254.0, 0.0, 1e-30], [5.0, 0.0, 0.0], [127.0, 0.0, -1e-30]])
    np.testing.assert_allclose(int8_scales(matrix), [2.0, 1.0, 1e-30 / 127], rtol=1e-6)
    np.testing.assert_array_equal(int8_values(matrix), [[-127, 0, 127], [2, 0, 0], [64, 0, -127]])


def test_bytes_of_weights(checkpoint: CheckpointOf) -> None:
    """A byte for each element of a matrix, four for each of its columns; the embedding and the norms as they were."""
    folder = checkpoint("llama")
    plain = load_params(folder, ModelConfig.from_pretrained(folder), mesh_of(1), jnp.bfloat16, progress=False)
    matrices = [array for array in jax.tree.leaves({**plain, "embed": None}) if array.ndim == 2]
    saved = sum(array.size - 4 * array.shape[1] for array in matrices)
    trees = (plain, load(folder, 1, dtype=jnp.bfloat16))
    held = [sum(array.nbytes for array in jax.tree.leaves(tree)) for tree in trees]
    assert held[0] - held[1] == saved > 0


def test_bfloat16_activations(checkpoint: CheckpointOf) -> None:
    folder, ids = checkpoint("qwen3"), prompt(24, 300)
    exact = rounded_oracle_logits(folder, ids)
    logits = logits_of(load(folder, 2, dtype=jnp.bfloat16), config_of(folder), ids, 2, dtype=jnp.bfloat16)
    assert np.abs(logits - exact).mean() < 0.05 * exact.std()
