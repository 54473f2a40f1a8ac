"""Mixtures of experts: every layout of checkpoints, what is refused, and that no token sees what else is in its step."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import load_model
from dense_model import folder_logits, mesh_of, oracle_logits, prompt
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxserve.models import (
    CheckpointError,
    LayerSpec,
    ModelConfig,
    MoESpec,
    abstract_params,
    build_decoder,
    check_params,
    convert,
    load_params,
)
from jaxserve.models.grouped import Groups, _tiled, grouped_matmul
from jaxserve.models.specs import DenseMLPSpec

CheckpointOf = Callable[[str], Path]
HIDDEN = 64


def load(folder: Path, tp_size: int = 1, load_format: str = "auto", **changes: Any) -> Any:
    config = ModelConfig.from_pretrained(folder).replace(**changes)
    return load_params(folder, config, mesh_of(tp_size), jnp.float32, load_format, progress=False)


def layer_output(folder: Path, x: np.ndarray, is_live: np.ndarray | None = None, tp_size: int = 1) -> np.ndarray:
    """The decoder's layers without attention, so that tokens meet nowhere but in the experts."""
    config = ModelConfig.from_pretrained(folder)
    decoder = build_decoder(config, tp_size)

    def attend(inputs: Any, kv: Any, layer: Any, index: Any) -> tuple[jax.Array, Any]:
        return inputs.qkv[:, :, :-2].reshape(len(inputs.qkv), -1, layer.head_dim), kv

    def run(params: Any, x: jax.Array) -> jax.Array:
        context = decoder.context(jnp.zeros(len(x), jnp.int32), None if is_live is None else jnp.asarray(is_live))
        return decoder.forward(params, x, context, jnp.int32(0), attend).hidden

    specs = jax.tree.map(lambda info: info.spec, abstract_params(config, jnp.float32, tp_size))
    whole = PartitionSpec()
    program = jax.shard_map(run, mesh=mesh_of(tp_size), in_specs=(specs, whole), out_specs=whole, check_vma=False)
    return np.asarray(jax.jit(program)(load(folder, tp_size), x))


def some_tokens(count: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, HIDDEN)).astype(np.float32)


def test_experts_in_one_tensor(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    folder = checkpoint("qwen3-moe")
    load_model(folder).save_pretrained(tmp_path, save_original_format=False)
    for tp_size in (1, 4):
        jax.tree.map(np.testing.assert_array_equal, load(tmp_path, tp_size), load(folder, tp_size))


@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("quantization", [None, "int8wo"])
def test_converted_weights_and_whole_experts_per_device(
    quantization: str | None, tp_size: int, checkpoint: CheckpointOf, tmp_path: Path
) -> None:
    folder = checkpoint("qwen3-moe")
    params = load(folder, tp_size, quantization=quantization)
    restored = load(convert(folder, tmp_path / "converted", progress=False), tp_size, quantization=quantization)
    jax.tree.map(np.testing.assert_array_equal, restored, params)
    for weight, shape in (("gate_up", (8, 64, 96)), ("down", (8, 48, 64))):
        for array in jax.tree.leaves(params["layers"][0]["mlp"][weight]):
            assert array.shape in (shape, (shape[0], shape[2]))
            assert array.addressable_shards[-1].data.shape == (8 // tp_size, *array.shape[1:])


def test_dummy_weights(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    shutil.copy(checkpoint("qwen3-moe") / "config.json", tmp_path)
    ids = prompt(24, 500)
    logits = folder_logits(tmp_path, ids, load_format="dummy")
    assert 0.3 < logits.std() < 3
    np.testing.assert_allclose(folder_logits(tmp_path, ids, 4, load_format="dummy"), logits, atol=1e-4)


def test_checkpoint_before_transformers_5(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("qwen3-moe"), tmp_path / "model"))
    raw = json.loads((folder / "config.json").read_text())
    raw["num_experts"] = raw.pop("num_local_experts")
    (folder / "config.json").write_text(json.dumps(raw))
    ids = prompt(12, 500)
    np.testing.assert_allclose(folder_logits(folder, ids), oracle_logits(folder, ids), atol=1e-4)


def test_which_layers_have_experts(checkpoint: CheckpointOf) -> None:
    layers = ModelConfig.from_pretrained(checkpoint("qwen3-moe-some-layers")).layers
    assert [type(layer.mlp) for layer in layers] == [DenseMLPSpec, DenseMLPSpec, DenseMLPSpec, MoESpec, DenseMLPSpec]
    assert layers[3].mlp == MoESpec(num_experts=8, experts_per_token=3, intermediate_size=48)


def test_what_is_refused(checkpoint: CheckpointOf) -> None:
    folder = checkpoint("qwen3-moe")
    config = ModelConfig.from_pretrained(folder)
    layer = config.layers[0]
    six = dataclasses.replace(layer, mlp=MoESpec(num_experts=6, experts_per_token=2, intermediate_size=48))
    with pytest.raises(ValueError, match="--tp-size must divide the model's num_experts=6; got 4"):
        abstract_params(config.replace(layers=(six,)), jnp.float32, 4)
    with pytest.raises(ValueError, match="num_experts_per_tok=9 must not exceed num_experts=8"):
        ModelConfig.from_pretrained(folder, {"num_experts_per_tok": 9})
    with pytest.raises(ValueError, match="decoder_sparse_step must be a whole number of at least 1, got 0"):
        ModelConfig.from_pretrained(folder, {"decoder_sparse_step": 0})


@pytest.mark.parametrize(("name", "tensor"), [
    ("glm4-moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ("ernie-moe", "model.layers.1.mlp.moe_statics.e_score_correction_bias"),
    ("granite-moe", "model.layers.0.block_sparse_moe.input_linear.weight"),
    ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
    ("qwen2-moe", "model.layers.0.mlp.shared_expert_gate.weight"),
])  # fmt: skip
def test_a_tensor_that_is_missing_is_named(name: str, tensor: str, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint(name), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(tensor)):
        check_params(folder, ModelConfig.from_pretrained(folder), mesh_of(1), jnp.float32)


def test_experts_and_shared_sizes_that_no_device_count_divides(checkpoint: CheckpointOf) -> None:
    config = ModelConfig.from_pretrained(checkpoint("glm4-moe"), {"n_routed_experts": 12})
    with pytest.raises(ValueError, match="--tp-size must divide the model's num_experts=12; got 8"):
        abstract_params(config.replace(layers=(_with_heads(config.layers[1], 8),)), jnp.float32, 8)
    config = ModelConfig.from_pretrained(checkpoint("qwen2-moe"), {"shared_expert_intermediate_size": 82})
    with pytest.raises(ValueError, match="--tp-size must divide the model's size of shared experts=82; got 4"):
        abstract_params(config, jnp.float32, 4)


def _with_heads(layer: LayerSpec, count: int) -> LayerSpec:
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, num_heads=count))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_token_alone_and_in_a_crowd(tp_size: int, checkpoint: CheckpointOf) -> None:
    x = some_tokens(37)
    crowd = layer_output(checkpoint("qwen3-moe"), x, tp_size=tp_size)
    for token in (0, 20, 36):
        alone = layer_output(checkpoint("qwen3-moe"), x[token : token + 1], tp_size=tp_size)
        np.testing.assert_allclose(alone[0], crowd[token], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_padding_reaches_no_expert(tp_size: int, checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counted(x: jax.Array, matrices: jax.Array, groups: Groups, out_dtype: Any) -> jax.Array:
        jax.debug.callback(lambda sizes: computed.append(int(sizes.sum())), groups.sizes)
        return grouped_matmul(x, matrices, groups, out_dtype)

    monkeypatch.setattr("jaxserve.models.weight.grouped_matmul", counted)
    folder, tokens = checkpoint("qwen3-moe"), some_tokens(5)
    padded, is_live = np.full((16, HIDDEN), np.nan, np.float32), np.arange(16) < 5
    padded[:5] = tokens
    out = layer_output(folder, padded, is_live, tp_size)
    jax.effects_barrier()
    assert sum(computed) == 2 * 2 * 5 * 3  # of two layers two products, three choices of five tokens, over all shards
    np.testing.assert_allclose(out[:5], layer_output(folder, tokens, tp_size=tp_size), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(3, 0, 9, 1), (0, 0, 0, 0), (16, 0, 0, 0), (0, 0, 0, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_grouped_products(sizes: tuple[int, ...], dtype: Any) -> None:
    random = np.random.default_rng(0)
    x, matrices = random.standard_normal((16, 12)).astype(np.float32), random.integers(-9, 9, (4, 12, 20)).astype(dtype)
    of_row = np.repeat(np.arange(5), [*sizes, 16 - sum(sizes)])
    expected = [row @ matrices[group].astype(np.float32) for row, group in zip(x, of_row, strict=True) if group < 4]
    groups = Groups(jnp.asarray(sizes, jnp.int32), jnp.asarray(of_row))
    results = [_tiled(jnp.asarray(x), jnp.asarray(matrices), groups.sizes, tile) for tile in (1, 4, 64)]
    results.append(grouped_matmul(jnp.asarray(x), jnp.asarray(matrices), groups, jnp.float32))
    for result in results:
        assert result.shape == (16, 20) and np.all(np.isfinite(result))
        np.testing.assert_allclose(result[: sum(sizes)], np.reshape(expected, (-1, 20)), rtol=1e-5, atol=1e-5)
