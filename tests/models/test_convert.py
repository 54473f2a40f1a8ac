"""`convert` and Orbax: the same weights from the other format, on any number of devices, and its error sentences."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import make_checkpoint
from dense_model import folder_logits, mesh_of, oracle_logits, prompt

from jaxserve.models import CheckpointError, ModelConfig, convert, load_params

CheckpointOf = Callable[[str], Path]


@pytest.mark.parametrize("name", ["llama-biases", "mistral", "qwen3-biases"])
def test_restored_arrays_equal_those_of_the_source(name: str, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    source = checkpoint(name)
    target = convert(source, tmp_path / "converted", progress=False)
    config = ModelConfig.from_pretrained(target)
    assert config == ModelConfig.from_pretrained(source)
    for tp_size in (1, 2, 4):  # 4: more than the key/value heads of two cases
        mesh = mesh_of(tp_size)
        expected = load_params(source, config, mesh, jnp.float32, progress=False)
        restored = load_params(target, config, mesh, jnp.float32, progress=False)
        jax.tree.map(np.testing.assert_array_equal, restored, expected)
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding == b.sharding, restored, expected)))


def test_a_converted_folder_is_complete(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    source = checkpoint("qwen2")
    target = convert(source, tmp_path / "converted", progress=False)
    kept = {path.name for path in source.iterdir()} - {"model.safetensors"}
    assert {path.name for path in target.iterdir()} == kept | {"orbax"}
    ids = prompt(20, 500)
    np.testing.assert_allclose(folder_logits(target, ids, 2), oracle_logits(source, ids), atol=1e-4, rtol=0)


def test_types(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source", dtype="bfloat16")
    as_is = convert(source, tmp_path / "as_is", progress=False)
    widened = convert(source, tmp_path / "widened", "float32", progress=False)
    assert ModelConfig.from_pretrained(as_is).dtype == "bfloat16"
    assert ModelConfig.from_pretrained(widened).dtype == "float32"
    ids = prompt(20, 500)
    np.testing.assert_array_equal(folder_logits(as_is, ids), folder_logits(widened, ids))
    half = make_checkpoint("llama", tmp_path / "half", dtype="float16")
    converted = convert(half, tmp_path / "converted", progress=False)
    assert json.loads((converted / "config.json").read_text())["dtype"] == "bfloat16"


def test_refusals(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    source = checkpoint("llama")
    target = convert(source, tmp_path / "converted", progress=False)
    with pytest.raises(ValueError, match="already holds converted weights"):
        convert(source, target)
    with pytest.raises(ValueError, match="must not be the model's own"):
        convert(source, source)
    with pytest.raises(ValueError, match="dtype must be auto, float32 or bfloat16; got 'int8'"):
        convert(source, tmp_path / "other", "int8")
    assert not (tmp_path / "other").exists()


def test_damaged_orbax(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    target = convert(checkpoint("llama"), tmp_path / "converted", progress=False)
    config = ModelConfig.from_pretrained(target)

    def load(config: ModelConfig) -> None:
        load_params(target, config, mesh_of(1), jnp.float32, progress=False)

    with pytest.raises(
        CheckpointError, match=r"orbax: tensor embed has shape \[512, 64\], but config.json asks for \[600, 64\]"
    ):
        load(config.replace(vocab_size=600))
    with pytest.raises(CheckpointError, match=r"orbax: tensor layers.2.attn.o is missing"):
        load(config.replace(layers=config.layers[:1] * 3))
    shutil.rmtree(target / "orbax")
    (target / "orbax").mkdir()
    with pytest.raises(CheckpointError, match="orbax holds no complete Orbax checkpoint"):
        load(config)


_LOAD = """
import sys, jax.numpy as jnp, numpy as np, jax
from jaxserve.models import CheckpointError, ModelConfig, load_params
mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
try:
    load_params(sys.argv[1], ModelConfig.from_pretrained(sys.argv[1]), mesh, jnp.float32, progress=False)
except CheckpointError as error:
    print(error)
"""


def test_orbax_with_damaged_data(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    """In a process of its own: Orbax drops the reads under way when one fails, and Python reports each of them later."""
    target = convert(checkpoint("llama"), tmp_path / "converted", progress=False)
    largest = max((target / "orbax").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    shown = subprocess.run([sys.executable, "-c", _LOAD, str(target)], capture_output=True, text=True, check=True).stdout
    assert re.match(r"\S+orbax cannot be read as an Orbax checkpoint: tensor (layers\.\d|embed|lm_head|final_norm)", shown), (
        shown
    )
    assert shown.count("\n") == 1
