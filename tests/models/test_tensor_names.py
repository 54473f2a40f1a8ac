"""Checkpoints that name tensors otherwise, or store several as one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from dense_model import folder_logits, mesh_of, prompt
from safetensors.numpy import load_file, save_file

from jaxserve.models import CheckpointError, ModelConfig, check_params, convert
from jaxserve.models.arrays import ArrayInfo, Derived, Rows, Source, Stacked
from jaxserve.models.stored_as import stored_as
from jaxserve.models.tensor_names import LLAMA_NAMES, Packed, TensorNames

QKV = ("q_proj", "k_proj", "v_proj")


@pytest.mark.parametrize(("name", "expected"), [
    ("model.layers.7.self_attn.o_proj.weight", "transformer.blocks.7.attention.wo.weight"),
    ("model.layers.7.mlp.experts.0.o_proj_extra.weight", "transformer.blocks.7.mlp.experts.0.o_proj_extra.weight"),
    ("model.layers.7.before.weight", "transformer.blocks.7.behind.weight"),
    ("model.layers.7.behind.weight", "transformer.blocks.7.before.weight"),
    ("lm_head.weight", "output.weight"),
])  # fmt: skip
def test_whole_parts_of_names_are_replaced_at_once(name: str, expected: str) -> None:
    renamed = (
        ("self_attn", "self_attention"), ("self_attn.o_proj", "attention.wo"), ("model.layers", "transformer.blocks"),
        ("before", "behind"), ("behind", "before"), ("lm_head", "output"),
    )  # fmt: skip
    assert TensorNames(renamed).of(name) == expected


def rows_of(source: Source, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """What a source describes, [rows, in]."""
    assert [tensors[name].shape for name in source.names] == list(source.shapes)
    parts = []
    for row in source.rows:
        places = row.start + row.step * np.arange(row.count)
        parts.append(np.zeros((row.count, 3)) if row.tensor is None else tensors[source.names[row.tensor]][places])
    return np.concatenate(parts)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_rows_are_found_in_the_tensor_that_holds_several(groups: int, order: tuple[int, ...]) -> None:
    rng, sizes = np.random.default_rng(0), {"q_proj": 24, "k_proj": 8, "v_proj": 8}
    parts = {f"x.{name}.weight": rng.normal(size=(size, 3)) for name, size in sizes.items()}
    rows = (
        Rows(1, 1, 3, 2), Rows(0, 0, 24), Rows(None, 0, 2), Rows(2, 2, 5), Rows(0, 3, 5, 4), Rows(0, 23, 1), Rows(1, 7, 1, 9),
    )  # fmt: skip
    source = Source(tuple(parts), tuple(part.shape for part in parts.values()), rows, transposed=True)
    pack = Packed("qkv", tuple(QKV[part] for part in order), groups)
    runs = [np.split(parts[f"x.{name}.weight"], groups) for name in pack.parts]
    packed = np.concatenate([of_part[group] for group in range(groups) for of_part in runs])
    info = ArrayInfo((3, 44), np.dtype(np.float32), ("hidden", "mlp"), source)
    stored = stored_as(info, TensorNames((("x", "y"),), (pack,)))
    assert isinstance(stored.source, Source)
    assert stored.source.names == ("y.qkv.weight",)
    np.testing.assert_array_equal(rows_of(stored.source, {"y.qkv.weight": packed}), rows_of(source, parts))


def test_every_kind_of_source_is_rewritten() -> None:
    def source(*names: str) -> Source:
        return Source(names, ((4, 3),) * len(names), tuple(Rows(place, 0, 4) for place in range(len(names))), transposed=True)

    def info(shape: tuple[int, ...], described: Source | Stacked | Derived) -> ArrayInfo:
        return ArrayInfo(shape, np.dtype(np.float32), ("experts", "hidden", "expert_mlp")[-len(shape) :], described)

    names = TensorNames((("experts", "all"),), (Packed("both", ("gate", "up")),))
    stacked = stored_as(
        info((2, 3, 8), Stacked((source("experts.0.gate", "experts.0.up"), source("down")), (source("experts.gate_up"),))),
        names,
    )
    assert isinstance(stacked.source, Stacked)
    assert [part.names for part in stacked.source.parts] == [("all.0.both",), ("down",)]
    assert [part.names for part in stacked.source.fused] == [("all.gate_up",)]
    derived = stored_as(info((3, 4), Derived(info((3, 4), source("experts")), np.asarray)), names)
    assert isinstance(derived.source, Derived)
    assert isinstance(derived.source.base.source, Source)
    assert derived.source.base.source.names == ("all",)
    assert stored_as(derived, LLAMA_NAMES) is derived


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy that a test may damage, of a model whose projections are fused."""
    return Path(shutil.copytree(checkpoint("phi3"), tmp_path / "model"))


def check(folder: Path, load_format: str = "auto") -> None:
    check_params(folder, ModelConfig.from_pretrained(folder), mesh_of(2), jnp.float32, load_format)


def test_half_a_checkpoint_is_told_by_the_names_in_it(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    whole = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {name} is missing\."):
        check(folder)
    save_file({**tensors, name: whole[:-16]}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {name} has shape \[112, 64\], but config.json asks for \[128, 64\]"):
        check(folder)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_converted_checkpoints_have_our_names(tp_size: int, folder: Path, tmp_path: Path) -> None:
    ids, converted = prompt(20, 500), convert(folder, tmp_path / "converted", progress=False)
    check(converted, "orbax")
    expected = folder_logits(folder, ids, tp_size)
    np.testing.assert_allclose(folder_logits(converted, ids, tp_size, load_format="orbax"), expected, atol=1e-5)


def test_dummy_weights_need_no_names(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert folder_logits(folder, prompt(8, 500), 2, load_format="dummy").std() > 0.3
