"""Reading Gemma 2 and Gemma 3: both spellings, what published files leave out, and the text part of a larger model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from dense_model import mesh_of
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from benchmarks.model_configs import GEMMA_2_9B, GEMMA_3_12B, GEMMA_3_27B, write_config
from jaxserve.models import CheckpointError, ModelConfig, NormSpec, RopeConfig, load_params

GLOBAL = RopeConfig(theta=1e6, kind="linear", factor=8.0, max_len_is_scaled=True)
LOCAL = RopeConfig(theta=1e4)
FLAT = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
NESTED = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912,
    "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
    "max_position_embeddings": 32768, "sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None, "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


def read(folder: Path, raw: dict[str, Any], overrides: dict[str, Any] | None = None) -> ModelConfig:
    return ModelConfig.from_pretrained(write_config(folder, raw), overrides)


def ropes(config: ModelConfig) -> dict[int | None, RopeConfig]:
    """By window."""
    return {layer.mixer.window: layer.mixer.rope for layer in config.layers}


def test_gemma2(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA_2_9B)
    layer = config.layers[0]
    assert config.windows == (4096, None) * 21
    assert (layer.mixer.soft_cap, config.logit_soft_cap, layer.mixer.scale) == (50.0, 30.0, 1 / 16)
    assert (layer.mlp.act, layer.norms_outputs, layer.mixer.qk_norm) == ("gelu_pytorch_tanh", True, None)
    assert layer.norm == config.final_norm == NormSpec(eps=1e-6, counts_from_one=True)
    assert config.embedding_scale == pytest.approx(3584**0.5)
    assert (config.tie_word_embeddings, config.context_len, config.eos_token_ids) == (True, 8192, (1,))


def test_gemma3_beside_a_part_for_images(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA_3_12B)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (16, 8, 256, 262208)
    assert config.windows == ((1024,) * 5 + (None,)) * 8
    assert ropes(config) == {1024: LOCAL, None: GLOBAL}
    assert config.layers[0].mixer.qk_norm == config.final_norm
    assert (config.logit_soft_cap, config.uses_soft_cap) == (None, False)
    assert config.context_len == 131072  # which is the stretched length
    assert (config.eos_token_ids, config.dtype) == ((1, 106), "bfloat16")
    assert read(tmp_path, GEMMA_3_27B).layers[0].mixer.scale == pytest.approx(168**-0.5)


def test_gemma3_without_one(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3_1B)
    assert config.windows == ((512,) * 5 + (None,)) * 4 + (512,) * 2
    assert ropes(config) == {512: LOCAL, None: RopeConfig(theta=1e6, max_len_is_scaled=True)}
    assert config.context_len == 32768


@pytest.mark.parametrize("spelling", [FLAT, NESTED], ids=["flat", "nested"])
def test_both_spellings_of_two_ropes_and_what_overrides_them(spelling: dict[str, Any], tmp_path: Path) -> None:
    raw = {key: value for key, value in GEMMA3_1B.items() if key not in FLAT} | spelling

    def changed(**overrides: Any) -> dict[int | None, RopeConfig]:
        return ropes(read(tmp_path, raw, overrides))

    assert changed() == {512: LOCAL, None: GLOBAL}
    scaling = {"rope_type": "linear", "factor": 2.0}
    stretched_less = RopeConfig(theta=1e6, kind="linear", factor=2.0, max_len_is_scaled=True)
    assert changed(rope_scaling=scaling) == {512: LOCAL, None: stretched_less}
    assert changed(rope_parameters={"full_attention": {**scaling, "rope_theta": 1e6}}) == {512: LOCAL, None: stretched_less}
    assert changed(rope_scaling=None) == {512: LOCAL, None: RopeConfig(theta=1e6, max_len_is_scaled=True)}
    faster = RopeConfig(theta=5e5, kind="linear", factor=8.0, max_len_is_scaled=True)
    assert changed(rope_theta=5e5) == {512: LOCAL, None: faster}


def test_overrides_reach_the_text_part(tmp_path: Path) -> None:
    assert read(tmp_path, GEMMA_3_12B, {"num_hidden_layers": 2}).num_layers == 2
    assert read(tmp_path, GEMMA_3_12B, {"text_config": {"num_hidden_layers": 2}}).num_layers == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number of at least 1, got 0"),
        ({"query_pre_attn_scalar": None}, "query_pre_attn_scalar must be a whole number of at least 1, got None"),
        ({"layer_types": ["full_attention"]}, "layer_types must have num_hidden_layers=26 entries, got 1"),
        ({"hidden_activation": "mish"}, "hidden_act must be one of silu, .* got 'mish'"),
        ({"attn_logit_softcapping": 0.0}, "attn_logit_softcapping must be a number above 0, got 0.0"),
        ({"final_logit_softcapping": "30"}, "final_logit_softcapping must be a number above 0, got '30'"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path, {**GEMMA3_1B, **changes})


def older_spelling(raw: dict[str, Any]) -> dict[str, Any]:
    ropes = raw.pop("rope_parameters")
    full, local = ropes["full_attention"], ropes["sliding_attention"]
    scaling = {"rope_type": full["rope_type"], "factor": full["factor"]}
    return {**raw, "rope_theta": full["rope_theta"], "rope_local_base_freq": local["rope_theta"], "rope_scaling": scaling}


def test_transformers_takes_the_older_spelling_for_the_same(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = checkpoint("gemma3")
    folder = write_config(tmp_path, older_spelling(json.loads((source / "config.json").read_text())))
    assert ModelConfig.from_pretrained(folder) == ModelConfig.from_pretrained(source)
    theirs = [AutoConfig.from_pretrained(path).rope_parameters for path in (folder, source)]
    assert theirs[0] == theirs[1]


def test_both_names_of_tensors_beside_a_part_for_images(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = checkpoint("gemma3-images")
    tensors = load_file(source / "model.safetensors")
    renamed = {name.replace("language_model.model.", "model.language_model."): value for name, value in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    config = ModelConfig.from_pretrained(source)
    params = [load_params(path, config, mesh_of(1), "float32", progress=False) for path in (tmp_path, source)]
    jax.tree.map(np.testing.assert_array_equal, *params)


def test_a_tensor_that_is_missing_beside_a_part_for_images(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = checkpoint("gemma3-images")
    tensors = load_file(source / "model.safetensors")
    del tensors["language_model.model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is missing"):
        load_params(tmp_path, ModelConfig.from_pretrained(source), mesh_of(1), "float32", progress=False)
