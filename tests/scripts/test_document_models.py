"""What is said of the models: the table in the package and docs/models.md, KV bytes beside the formula, nearest relatives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from model_families import CASES

from jaxserve.aot.footprint import Footprint
from jaxserve.cli.models import models
from jaxserve.models import ModelConfig, families
from jaxserve.models.families import find_family
from jaxserve.models.families.catalogue import catalogue
from scripts import document_models

CheckpointOf = Callable[[str], Path]


def test_the_table_and_the_page_are_what_the_script_writes(checkpoint: CheckpointOf) -> None:
    entries = document_models.catalogue(checkpoint)
    run = "run `python scripts/document_models.py`"
    assert document_models.TESTED.read_text() == document_models.tested_text(entries), run
    assert document_models.PAGE.read_text().endswith(document_models.page_tables(entries)), run


def test_every_architecture_is_known_or_another_name_of_one_that_is() -> None:
    untested = {family.architecture: family.read for family in families() if family.architecture not in catalogue()}
    tested = {family.read for family in families() if family.architecture in catalogue()}
    assert set(untested.values()) <= tested, sorted(untested)


@pytest.mark.parametrize("case", CASES)
def test_kv_bytes_are_those_of_the_formula(case: str, checkpoint: CheckpointOf) -> None:
    raw = json.loads((checkpoint(case) / "config.json").read_text())
    raw = {**(raw.get("text_config") or {}), **raw}
    found = Footprint.of(ModelConfig.from_pretrained(checkpoint(case)), "float32")
    if "kv_lora_rank" in raw:
        row = raw["kv_lora_rank"] + raw["qk_rope_head_dim"]
    else:
        head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        row = 2 * head_dim * (raw.get("num_key_value_heads") or raw["num_attention_heads"])
    num_states, state = _states(raw)
    assert sum(found.kv_token_bytes.values()) == (raw["num_hidden_layers"] - num_states) * row * 4
    assert found.state_bytes == num_states * state * 4


def _states(raw: dict[str, Any]) -> tuple[int, int]:
    """Layers that keep states, and the numbers in one."""
    if "mamba_n_heads" in raw:
        inner, conv = raw["mamba_n_heads"] * raw["mamba_d_head"], raw["mamba_d_conv"]
        channels, heads = inner + 2 * raw["mamba_n_groups"] * raw["mamba_d_state"], inner * raw["mamba_d_state"]
        kinds = raw.get("layer_types", [])  # Bamba names the layers that attend instead
        attending = len(raw.get("attn_layer_indices", ())) + kinds.count("full_attention") + kinds.count("attention")
        return raw["num_hidden_layers"] - attending, (conv - 1) * channels + heads
    if "linear_num_key_heads" in raw:
        keys, values = (raw[f"linear_num_{part}_heads"] * raw[f"linear_{part}_head_dim"] for part in ("key", "value"))
        state = (raw["linear_conv_kernel_dim"] - 1) * (2 * keys + values) + values * raw["linear_key_head_dim"]
        return raw["layer_types"].count("linear_attention"), state
    return 0, 0


@pytest.mark.parametrize(
    ("raw", "relative"),
    [
        ({"architectures": ["Qwen4ForCausalLM"]}, "Qwen"),
        (
            {"architectures": ["NewLatentForCausalLM"], "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128},
            "Deepseek",
        ),
        ({"model_type": "gemma9"}, "Gemma"),
        ({"architectures": ["Olmo4ForCausalLM"], "model_type": "olmo4"}, "Olmo"),
    ],
)
def test_the_nearest_relative_of_what_is_missing(raw: dict[str, Any], relative: str) -> None:
    with pytest.raises(
        ValueError, match=rf"not supported; the nearest that is: {relative}\w+ \(jaxserve/models/families/"
    ) as raised:
        find_family(raw)
    assert 'CONTRIBUTING.md, "Add a model family"' in str(raised.value)


def test_the_command_lists_them() -> None:
    said = CliRunner().invoke(models)
    assert said.exit_code == 0
    for family in families():
        assert f"\n{family.architecture} " in said.output
    as_json = json.loads(CliRunner().invoke(models, ["--json"]).output)
    assert as_json["Olmo2ForCausalLM"]["kernels"] == {"GPU": "pallas", "TPU": "pallas", "CPU": "native"}
    assert set(as_json) == {family.architecture for family in families()}


def test_the_command_says_what_a_config_is_read_as(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    said = CliRunner().invoke(models, [str(checkpoint("deepseek-v3"))])
    assert said.exit_code == 0, said.output
    assert "read as       DeepseekV3ForCausalLM, at most 512 tokens, vocabulary 512" in said.output
    assert "layers 1-2" in said.output and "336 bytes per token" in said.output  # 3 layers x (48 + 8) x 2
    (tmp_path / "config.json").write_text('{"architectures": ["T5ForConditionalGeneration"]}')
    said = CliRunner().invoke(models, [str(tmp_path)])
    assert said.exit_code == 1 and "not supported; the nearest that is" in said.output
