"""The head of Baichuan 2, whose rows count by their direction alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from dense_model import logits_of, mesh_of, oracle_logits, prompt
from safetensors.numpy import load_file

from jaxserve.models import ModelConfig, convert, load_params
from jaxserve.models.families import baichuan


@pytest.fixture
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("baichuan")


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.from_pretrained(folder).replace(lm_head_has_unit_rows=True)


def expected_logits(folder: Path, ids: list[int]) -> np.ndarray:
    rows = load_file(folder / "model.safetensors")["lm_head.weight"]
    return oracle_logits(folder, ids) / np.linalg.norm(rows, axis=1)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_rows_of_the_head_are_divided_by_their_length(tp_size: int, folder: Path) -> None:
    ids, config = prompt(24, 500), config_of(folder)
    params = load_params(folder, config, mesh_of(tp_size), jnp.float32, progress=False)
    np.testing.assert_allclose(logits_of(params, config, ids, tp_size), expected_logits(folder, ids), atol=1e-4)
    assert not np.any(np.asarray(params["lm_head"].matrix)[:, 503:])


def test_in_bfloat16_the_lengths_are_of_what_the_file_says(folder: Path) -> None:
    params = load_params(folder, config_of(folder), mesh_of(1), jnp.bfloat16, progress=False)
    columns = np.asarray(params["lm_head"].matrix).astype(np.float32)
    np.testing.assert_allclose(np.linalg.norm(columns, axis=0), 1, atol=4e-3)


def test_quantized_and_converted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, expected = prompt(24, 500), expected_logits(folder, prompt(24, 500))
    monkeypatch.setattr(baichuan, "_BAICHUAN2_VOCAB", 503)
    config = ModelConfig.from_pretrained(folder)
    assert config == config_of(folder)
    converted = convert(folder, tmp_path / "converted", progress=False)
    params = load_params(converted, config, mesh_of(2), jnp.float32, "orbax", progress=False)
    np.testing.assert_allclose(logits_of(params, config, ids, 2), expected, atol=1e-4)
    config = config.replace(quantization="int8wo")
    params = load_params(folder, config, mesh_of(1), jnp.float32, progress=False)
    logits = logits_of(params, config, ids)
    assert np.abs(logits - expected).mean() < 0.05 * expected.std()


@pytest.mark.parametrize(("vocab_size", "is_second"), [(64_000, False), (125_696, True)])
def test_the_second_one_is_known_by_its_vocabulary(vocab_size: int, is_second: bool, folder: Path, tmp_path: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "vocab_size": vocab_size}))
    assert ModelConfig.from_pretrained(tmp_path).lm_head_has_unit_rows is is_second
