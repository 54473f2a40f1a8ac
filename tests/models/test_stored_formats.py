"""Quantized checkpoints, read as if they were plain: slices, and what is wrong with files and configs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from dense_model import mesh_of
from safetensors.torch import load_file, save_file

from jaxserve.models import CheckpointError, ModelConfig, check_params, convert, load_params
from jaxserve.models.stored_formats import open_tensors

CheckpointOf = Callable[[str], Path]


def write(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return folder


@pytest.mark.parametrize("index", [(0, 37, 0, 50), (5, 6, 49, 50), (15, 17, 30, 33), (16, 32, 32, 50), (3, 36, 1, 49)])
def test_slices_of_fp8(index: tuple[int, int, int, int], tmp_path: Path) -> None:
    """Blocks of 16 rows and 32 columns, of which the last are cut off by the matrix."""
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(37, 50, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=generator) + 0.5
    plain = torch.randn(4, 3)
    names = {"a.weight": stored, "a.weight_scale_inv": scales, "norm.weight": plain}
    tensors = open_tensors(write(tmp_path, names, {"quant_method": "fp8", "weight_block_size": [16, 32]}))
    tensors.check("a.weight", (37, 50))
    tensors.check("norm.weight", (4, 3))
    whole = stored.float().numpy() * scales.numpy().repeat(16, 0)[:37].repeat(32, 1)[:, :50]
    rows, columns = slice(*index[:2]), slice(*index[2:])
    np.testing.assert_array_equal(tensors.read("a.weight", (rows, columns)), whole[rows, columns])
    np.testing.assert_array_equal(tensors.read("norm.weight", (slice(1, 3), slice(0, 3))), plain[1:3].numpy())


def test_every_float8(tmp_path: Path) -> None:
    stored = torch.arange(256, dtype=torch.uint8).reshape(16, 16).view(torch.float8_e4m3fn)
    names = {"a.weight": stored, "a.weight_scale_inv": torch.ones(1, 1)}
    tensors = open_tensors(write(tmp_path, names, {"quant_method": "fp8", "weight_block_size": [128, 128]}))
    np.testing.assert_array_equal(tensors.read("a.weight", (slice(0, 16), slice(0, 16))), stored.float().numpy())


@pytest.mark.parametrize("index", [(0, 2, 0, 96, 0, 6), (1, 2, 32, 64, 2, 5), (0, 1, 31, 65, 5, 6)])
def test_slices_of_mxfp4(index: tuple[int, ...], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (2, 6, 3, 16), np.uint8), rng.integers(120, 132, (2, 6, 3), np.uint8)
    files = {"up_blocks": torch.from_numpy(blocks), "up_scales": torch.from_numpy(scales)}
    tensors = open_tensors(write(tmp_path, files, {"quant_method": "mxfp4"}))
    tensors.check("up", (2, 96, 6))
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    whole = np.zeros((2, 96, 6), np.float32)
    for expert, out, group, byte in np.ndindex(blocks.shape):
        for half, code in enumerate((blocks[expert, out, group, byte] % 16, blocks[expert, out, group, byte] // 16)):
            number = numbers[code % 8] * (-1 if code >= 8 else 1)
            whole[expert, group * 32 + byte * 2 + half, out] = number * 2.0 ** (int(scales[expert, out, group]) - 127)
    parts = tuple(slice(*index[place : place + 2]) for place in (0, 2, 4))
    np.testing.assert_array_equal(tensors.read("up", parts), whole[parts])


@pytest.mark.parametrize(
    ("case", "missing"),
    [
        ("gpt-oss-mxfp4", "model.layers.1.mlp.experts.down_proj_scales"),
        ("gpt-oss-mxfp4", "model.layers.0.mlp.experts.gate_up_proj_bias"),
        ("gpt-oss-mxfp4", "model.layers.0.mlp.router.bias"),
        ("deepseek-v3-fp8", "model.layers.2.self_attn.kv_b_proj.weight_scale_inv"),
        ("deepseek-v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ],
)
def test_half_a_checkpoint(case: str, missing: str, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    shutil.copytree(checkpoint(case), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[missing]
    save_file(tensors, folder / "model.safetensors")
    config = ModelConfig.from_pretrained(folder)
    with pytest.raises(CheckpointError, match=f"tensor {missing} is missing"):
        check_params(folder, config, mesh_of(1), jnp.float32)


def test_scales_of_another_size(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(checkpoint("deepseek-v3-fp8"), folder)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["weight_block_size"] = [8, 8]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"weight_scale_inv has shape \[\d+, \d+\], but config.json asks for"):
        check_params(folder, ModelConfig.from_pretrained(folder), mesh_of(1), jnp.float32)


@pytest.mark.parametrize(
    ("quantization", "sentence"),
    [
        ({"quant_method": "gptq"}, r"quant_method 'gptq'\) are not supported; use fp8 and mxfp4, or an unquantized checkpoint"),
        ({}, None),
        ({"quant_method": "fp8"}, "weight_block_size of quant_method 'fp8' must be two numbers of at least 1, got None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"two numbers of at least 1, got \[128\]"),
    ],
)
def test_formats_that_are_not_read(
    quantization: dict[str, Any], sentence: str | None, checkpoint: CheckpointOf, tmp_path: Path
) -> None:
    raw = json.loads((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": quantization}))
    if sentence is None:
        ModelConfig.from_pretrained(tmp_path)
        return
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_pretrained(tmp_path)


def test_a_quantized_checkpoint_is_converted(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    import jax

    folder, plain = checkpoint("gpt-oss-mxfp4"), tmp_path / "orbax"
    convert(folder, plain, dtype="float32")
    config = ModelConfig.from_pretrained(folder)
    both = [load_params(path, config, mesh_of(2), jnp.float32, progress=False) for path in (folder, plain)]
    jax.tree.map(np.testing.assert_array_equal, *both)
