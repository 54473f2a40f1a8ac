"""A made-up kind of weight, of several arrays, two of them computed from the checkpoint's matrix: loaded, sharded, run."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_model import logits_of, mesh_of, prompt

from jaxserve.models import ModelConfig, convert, load_params, loading
from jaxserve.models.arrays import ArrayInfo, Derived
from jaxserve.models.blocks.declare import Declare
from jaxserve.models.weight import PlainWeight, Weight

CheckpointOf = Callable[[str], Path]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledColumns:
    """x @ (values * peaks): every column divided by its largest magnitude, which stands beside it."""

    values: Any  # [in, out]
    peaks: Any  # float32 [out]

    def project(self, x: jax.Array, out_dtype: Any = None) -> jax.Array:
        whole = self.values.astype(jnp.float32) * self.peaks
        return PlainWeight(whole.astype(x.dtype)).project(x, out_dtype)

    @staticmethod
    def of(matrix: ArrayInfo) -> ScaledColumns:
        out, axis = matrix.shape[1], matrix.logical_axes[1]
        values = dataclasses.replace(matrix, source=Derived(matrix, values_of))
        peaks = ArrayInfo((out,), np.dtype(np.float32), (axis,), Derived(matrix, peaks_of), groups=matrix.groups)
        return ScaledColumns(values, peaks)


def peaks_of(matrix: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(matrix.astype(jnp.float32)), axis=0)


def values_of(matrix: jax.Array) -> jax.Array:
    return (matrix / peaks_of(matrix)).astype(matrix.dtype)


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    def weight(self: Declare, matrix: ArrayInfo) -> Weight:
        return ScaledColumns.of(matrix) if matrix.logical_axes != ("hidden", "vocab") else PlainWeight(matrix)

    monkeypatch.setattr(Declare, "weight", weight)


def load(folder: Path, tp_size: int, load_format: str = "auto", dtype: Any = jnp.float32) -> Any:
    return load_params(folder, ModelConfig.from_pretrained(folder), mesh_of(tp_size), dtype, load_format, progress=False)


def check(params: Any, plain: Any, tp_size: int) -> None:
    """Every weight is what is derived of the plain one, and each device holds its columns and their scales."""
    held, matrix = params["layers"][1]["attn"]["o"], plain["layers"][1]["attn"]["o"].matrix
    np.testing.assert_allclose(held.peaks, np.abs(matrix).max(axis=0), rtol=1e-6)
    np.testing.assert_allclose(held.values * held.peaks, matrix, rtol=1e-5, atol=1e-7)
    qkv = params["layers"][0]["attn"]["qkv"]
    assert qkv.values.addressable_shards[0].data.shape[1] * tp_size == qkv.values.shape[1]
    assert qkv.peaks.addressable_shards[0].data.shape[0] * tp_size == qkv.peaks.shape[0]
    np.testing.assert_array_equal(params["lm_head"].matrix, plain["lm_head"].matrix)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_derived_weights_of_every_format(
    tp_size: int, checkpoint: CheckpointOf, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = checkpoint("llama")
    converted = convert(folder, tmp_path / "converted", progress=False)
    dummy = tmp_path / "dummy"
    dummy.mkdir()
    shutil.copy(folder / "config.json", dummy)
    plain = {kind: load(where, tp_size, kind) for kind, where in (("safetensors", folder), ("dummy", dummy))}
    ids, config = prompt(12, 300), ModelConfig.from_pretrained(folder)
    expected = logits_of(plain["safetensors"], config, ids, tp_size)

    request.getfixturevalue("scaled")
    params = {kind: load(where, tp_size, kind) for kind, where in (("safetensors", folder), ("dummy", dummy))}
    check(params["safetensors"], plain["safetensors"], tp_size)
    check(params["dummy"], plain["dummy"], tp_size)
    np.testing.assert_allclose(logits_of(params["safetensors"], config, ids, tp_size), expected, atol=1e-4)
    restored = load(converted, tp_size)
    jax.tree.map(np.testing.assert_array_equal, restored, params["safetensors"])


def test_what_was_derived_from_is_freed_and_counted_by_what_it_became(
    scaled: None, checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(loading, "progress_bar", lambda total, *_, **__: _Counter(total, counted))
    folder = checkpoint("llama")
    before = sum(array.nbytes for array in jax.live_arrays())
    params = load_params(folder, ModelConfig.from_pretrained(folder), mesh_of(1), jnp.float32)
    held = sum(array.nbytes for array in jax.tree.leaves(params))
    assert sum(array.nbytes for array in jax.live_arrays()) - before == held
    assert sum(counted[1:]) == counted[0] > 0


class _Counter(contextlib.nullcontext[Any]):
    """A progress bar that keeps its total and its steps."""

    def __init__(self, total: int, counted: list[int]) -> None:
        super().__init__(self)
        counted.append(total)
        self.update = counted.append
