"""Reading config.json: both spellings of rope and dtype, what families decide, and the sentences for what is not supported."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import build_model
from model_families import CASES

from jaxserve.models import DenseMLPSpec, ModelConfig, MoESpec, NormSpec, RopeConfig, generation_defaults

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def write(folder: Path, raw: dict[str, Any], name: str = "config.json") -> Path:
    (folder / name).write_text(json.dumps(raw))
    return folder


def read(folder: Path, **changes: Any) -> ModelConfig:
    raw = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    return ModelConfig.from_pretrained(write(folder, raw))


def test_older_config(tmp_path: Path) -> None:
    config = read(tmp_path, rope_theta=500000.0, rope_scaling={"type": "linear", "factor": 2.0})
    layer = config.layers[0]
    assert layer.mixer.rope == RopeConfig(theta=500000.0, kind="linear", factor=2.0)
    assert (config.head_dim, layer.mixer.group_size, config.dtype, layer.norm.eps) == (16, 2, "bfloat16", 1e-5)
    assert layer.norm == config.final_norm
    assert config.windows == (None, None, None)
    assert config.context_len == 2048


@pytest.mark.parametrize(
    "key", [*LLAMA, "rope_scaling", "rope_parameters", "text_config", "quantization_config", "layer_types"]
)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_values_of_any_kind_are_read_or_refused_with_the_file_named(tmp_path: Path, key: str, architecture: str) -> None:
    for odd in ("x", -1, 0, 2.5, [], {}, None, True, [1], [None], {"a": 1}, float("inf")):
        refused = None
        try:
            read(tmp_path, **{"architectures": [architecture], key: odd})
        except ValueError as error:
            refused = str(error)
        assert refused is None or refused.startswith(str(tmp_path / "config.json")), (odd, refused)


@pytest.mark.parametrize(("changes", "words"), [
    ({"rope_scaling": "x"}, "a value is of the wrong kind"),
    ({"eos_token_id": "2"}, "eos_token_id must be a whole number or a list of them, got '2'"),
    ({"text_config": 3}, "a value is of the wrong kind"),
])  # fmt: skip
def test_a_value_of_the_wrong_kind(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(tmp_path, **changes)


def test_newer_config(tmp_path: Path) -> None:
    params = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}
    config = read(tmp_path, rope_parameters=params, torch_dtype=..., dtype="float16")
    assert config.layers[0].mixer.rope == RopeConfig(theta=500000.0, kind="linear", factor=2.0)
    assert config.dtype == "float16"


# Families whose modules Transformers builds as it does Llama's; what others read from their config, their logits show.
BUILT_LIKE_LLAMA = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma2", "Gemma3")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.family in BUILT_LIKE_LLAMA])
def test_what_transformers_writes_is_read_back(name: str, tmp_path: Path) -> None:
    model = build_model(CASES[name], 1, 2)
    model.config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path, {**raw, "architectures": [type(model).__name__]})
    theirs, ours = model.config.get_text_config(), ModelConfig.from_pretrained(tmp_path)
    layers = getattr(model.model, "language_model", model.model).layers
    layer = layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    spec = ours.layers[0]
    assert ours.head_dim == attention.head_dim
    assert spec.mixer.group_size == attention.num_key_value_groups
    assert spec.mixer.qkv_bias == (attention.q_proj.bias is not None)
    assert spec.mixer.o_bias == (attention.o_proj.bias is not None)
    with_experts = [hasattr(layer.mlp, "experts") for layer in layers]
    assert [isinstance(layer.mlp, MoESpec) for layer in ours.layers] == with_experts
    if isinstance(spec.mlp, DenseMLPSpec):
        assert spec.mlp.bias == (mlp.up_proj.bias is not None)
    assert (spec.mixer.qk_norm is not None) == hasattr(attention, "q_norm")
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert spec.mixer.scale == pytest.approx(attention.scaling)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * ours.num_layers
    for kind, layer_spec in zip(types, ours.layers, strict=True):
        rope = theirs.rope_parameters.get(kind, theirs.rope_parameters)
        assert (layer_spec.mixer.rope.kind, layer_spec.mixer.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    window = getattr(theirs, "sliding_window", None)
    assert ours.windows == tuple(window if kind == "sliding_attention" else None for kind in types)


def test_llama3_rope(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }  # fmt: skip
    config = read(tmp_path, rope_scaling=scaling, rope_theta=500000.0)
    rope = config.layers[0].mixer.rope
    assert (rope.kind, rope.factor, rope.original_max_len) == ("llama3", 8.0, 128)
    assert config.context_len == 1024  # max_position_embeddings is already the extended length


def test_yarn_without_an_original_length_extends_the_context(tmp_path: Path) -> None:
    config = read(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0, "beta_fast": 16})
    rope = config.layers[0].mixer.rope
    assert (rope.original_max_len, rope.beta_fast, config.context_len) == (1024, 16, 4096)
    named = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert read(tmp_path, rope_scaling=named).context_len == 1024  # max_position_embeddings is the extended length
    assert read(tmp_path, rope_scaling={**named, "factor": 8.0}).context_len == 2048  # it is not: Qwen2.5 writes this


def test_windows_of_qwen(tmp_path: Path) -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 2}
    assert read(tmp_path, **qwen).windows == (None, None, None)
    assert read(tmp_path, **qwen, use_sliding_window=True).windows == (None, None, 8)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read(tmp_path, **qwen, use_sliding_window=True, layer_types=types).windows == (8, None, 8)
    with pytest.raises(ValueError, match="layer_types must have num_hidden_layers=3 entries, got 1"):
        read(tmp_path, **qwen, use_sliding_window=True, layer_types=types[:1])
    with pytest.raises(ValueError, match="got 'chunked_attention'"):
        read(tmp_path, **qwen, use_sliding_window=True, layer_types=["chunked_attention"] * 3)


def test_model_type_serves_where_architectures_is_missing(tmp_path: Path) -> None:
    config = read(tmp_path, architectures=..., model_type="qwen3")
    assert (config.architecture, config.head_dim) == ("Qwen3ForCausalLM", 128)
    assert config.layers[0].mixer.qk_norm == NormSpec(eps=1e-5)


def test_what_is_asked_of_all_layers_at_once(tmp_path: Path) -> None:
    config = read(tmp_path)
    layer = config.layers[0]
    wide = dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, head_dim=32, soft_cap=50.0, window=8))
    assert (config.uses_soft_cap, config.uses_sinks) == (False, False)
    config = config.replace(layers=(layer, wide))
    assert (config.num_layers, config.windows, config.num_heads) == (2, (None, 8), 4)
    assert (config.uses_soft_cap, config.uses_sinks) == (True, False)
    with pytest.raises(ValueError, match="the layers of LlamaForCausalLM differ in head_dim: 16, 32"):
        _ = config.head_dim


def test_eos_token_ids(tmp_path: Path) -> None:
    assert read(tmp_path).eos_token_ids == (2,)
    assert read(tmp_path, eos_token_id=[2, 5]).eos_token_ids == (2, 5)
    assert read(tmp_path, eos_token_id=...).eos_token_ids == ()
    write(tmp_path, {"eos_token_id": [7, 8], "temperature": 0.6, "top_k": 0, "top_p": None}, "generation_config.json")
    assert read(tmp_path).eos_token_ids == (7, 8)
    assert ModelConfig.from_pretrained(tmp_path, {"eos_token_id": 9}).eos_token_ids == (9,)
    assert generation_defaults(tmp_path) == {"temperature": 0.6, "top_k": -1}


def test_generation_defaults_without_a_file(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == {}


def test_overrides(tmp_path: Path) -> None:
    read(tmp_path, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0})

    def rope(**overrides: Any) -> RopeConfig:
        return ModelConfig.from_pretrained(tmp_path, overrides).layers[0].mixer.rope

    assert ModelConfig.from_pretrained(tmp_path, {"num_hidden_layers": 1}).num_layers == 1
    assert rope(rope_theta=7.0) == RopeConfig(theta=7.0, kind="linear", factor=2.0)
    scaled = RopeConfig(theta=500.0, kind="dynamic", factor=4.0)
    assert rope(rope_scaling={"type": "dynamic", "factor": 4.0}) == scaled
    assert rope(rope_parameters={"rope_type": "dynamic", "factor": 4.0}) == scaled
    assert rope(rope_scaling=None) == RopeConfig(theta=500.0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"architectures": ["FooForCausalLM"]},
            "architecture 'FooForCausalLM' is not supported; the nearest that is: .*CONTRIBUTING.md",
        ),
        ({"architectures": ["LlamaForQuestionAnswering"]}, "'LlamaForQuestionAnswering' is not supported"),
        ({"architectures": ..., "model_type": "foo"}, "model_type 'foo' .* is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
        ({"hidden_size": ...}, "hidden_size must be a whole number of at least 1, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, got 0"),
        ({"num_key_value_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"head_dim": -4}, "head_dim must be a whole number of at least 1, got -4"),
        ({"hidden_act": "mish"}, "hidden_act must be one of silu, .* got 'mish'"),
        ({"rope_scaling": {"type": "axial", "factor": 2.0}}, "rope type 'axial' is not supported; supported: default,"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs a factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "must be at least 1, got 0.5"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "rope type 'llama3' needs low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window must be at least 1 token, got 0"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        read(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(error.value)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json must hold a JSON object, got list"):
        ModelConfig.from_pretrained(tmp_path)


def test_reading_a_config_starts_neither_jax_nor_torch() -> None:
    code = "import sys, jaxserve.models; sys.exit(any(m in sys.modules for m in ('jax', 'flax', 'torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_layers_of_one_window_are_a_kv_group(tmp_path: Path) -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": True}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = read(tmp_path, **qwen, layer_types=types)
    assert config.kv_windows == (None, 8) and config.kv_indices == (0, 0, 1)
    mistral = read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=8)
    assert mistral.kv_windows == (8,) and mistral.kv_indices == (0, 1, 2)


def test_a_window_that_no_sequence_outgrows_is_none(tmp_path: Path) -> None:
    config = read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=8)
    assert config.for_context(9) == config
    short = config.for_context(8)
    assert short.windows == (None, None, None) and short.kv_windows == (None,)
    assert short.replace(layers=config.layers) == config
