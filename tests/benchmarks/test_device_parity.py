"""The checkpoint that `parity` and `server` run is the demo model with wider heads, and what differs from a reference is said.

`make device-dry-run` generates with both and compares them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.device.checkpoint import WEIGHTS, read_arrays, widened_demo
from benchmarks.device.parity import Generated, compare
from jaxserve.demo import demo_model_path

LAYER = "model.layers.3.self_attn."
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Arrays, Arrays]:
    folders = Path(demo_model_path()), widened_demo(tmp_path_factory.mktemp("wide"))
    original, wide = (read_arrays(folder / WEIGHTS) for folder in folders)
    return tuple({name: array.astype(np.float64) for name, array in arrays.items()} for arrays in (original, wide))


def attended(arrays: Arrays, head_dim: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By definition, for x [T, hidden]: the scores of queries and keys [H, T, T], and what comes of each token's values had it
    attended to itself alone [T, hidden]."""

    def heads(which: str) -> np.ndarray:
        y = (x @ arrays[f"{LAYER}{which}_proj.weight"].T).reshape(len(x), -1, head_dim)
        if which == "v":
            return y
        y = y / np.sqrt((y**2).mean(-1, keepdims=True)) * arrays[f"{LAYER}{which}_norm.weight"]
        angles = 7.0 * np.arange(len(x))[:, None] / 10000.0 ** (2 * np.arange(head_dim // 2) / head_dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = np.split(y, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    q, k, v = heads("q"), heads("k"), heads("v")
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, axis=1)) / np.sqrt(head_dim)
    return scores, np.repeat(v, group, axis=1).reshape(len(x), -1) @ arrays[f"{LAYER}o_proj.weight"].T


def test_the_widened_checkpoint_is_the_demo_model(checkpoints: tuple[Arrays, Arrays]) -> None:
    original, wide = checkpoints
    x = np.random.default_rng(0).standard_normal((9, original[f"{LAYER}q_proj.weight"].shape[1]))
    (scores, values), (wide_scores, wide_values) = attended(original, 32, x), attended(wide, 64, x)
    # The keys' norm was divided by the square root of 2 and rounded to bfloat16.
    assert np.linalg.norm(wide_scores - scores) < 4e-3 * np.linalg.norm(scores)
    np.testing.assert_allclose(wide_values, values, rtol=1e-12, atol=1e-12)
    same = [name for name in original if "self_attn" not in name]
    assert same and all((original[name] == wide[name]).all() for name in same)


def test_what_differs_is_said() -> None:
    want = Generated(np.asarray([[1, 2, 3, 4]]), np.zeros((1, 4)))
    late = compare(Generated(np.asarray([[1, 2, 3, 5]]), np.zeros((1, 4))), want)
    assert late["tokens_agreed"] == 0.75 and "status" not in late
    early = compare(Generated(np.asarray([[1, 7, 3, 4]]), np.full((1, 4), 0.2)), want)
    assert early["status"] == "failed" and early["tokens_agreed"] == 0.25
    assert "before the first other one" in early["reason"] and "the logprobs differ by 0.200" in early["reason"]
    assert "NaN" in compare(Generated(np.asarray([[-1, 2, 3, 4]]), None), want)["reason"]
