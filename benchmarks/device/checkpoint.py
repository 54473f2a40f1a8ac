"""The demo checkpoint with heads that GPU kernels take: the same model, its heads of 32 numbers spread over 64 with zeros."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

_OLD, _NEW = 32, 64
# Rotary pairs are (i, i + D / 2) and turn by theta ** (-2 i / D): number i of 32 turns as number 2 i of 64.
_SPREAD = np.concatenate([2 * np.arange(_OLD // 2), 2 * np.arange(_OLD // 2) + _NEW // 2])


def widened_demo(folder: Path) -> Path:
    """Writes it into `folder` and returns that.

    With twice the numbers, half of them 0, an RMS norm gives the square root of 2 too much for keys and queries each, and the
    attention scale as much too little: so one of the two norms' weights is divided by it.
    """
    from safetensors.flax import load_file, save_file

    from jaxserve.demo import demo_model_path

    source = Path(demo_model_path())
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    assert config["head_dim"] == _OLD, config["head_dim"]
    (folder / "config.json").write_text(json.dumps({**config, "head_dim": _NEW}))
    arrays = {name: _widened(name, np.asarray(array)) for name, array in load_file(source / "model.safetensors").items()}
    import jax.numpy as jnp

    save_file({name: jnp.asarray(array) for name, array in arrays.items()}, folder / "model.safetensors")
    return folder


def _widened(name: str, array: np.ndarray) -> np.ndarray:
    places = np.arange(_OLD) if "v_proj" in name or "o_proj" in name else _SPREAD
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        heads = array.reshape(-1, _OLD, array.shape[-1])
        wide = np.zeros((heads.shape[0], _NEW, heads.shape[2]), array.dtype)
        wide[:, places] = heads
        return wide.reshape(-1, array.shape[-1])
    if name.endswith("o_proj.weight"):
        heads = array.reshape(array.shape[0], -1, _OLD)
        wide = np.zeros((*heads.shape[:2], _NEW), array.dtype)
        wide[..., places] = heads
        return wide.reshape(array.shape[0], -1)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        wide = np.zeros(_NEW, array.dtype)
        wide[places] = array if "q_norm" in name else (array.astype(np.float32) / np.sqrt(2)).astype(array.dtype)
        return wide
    return array
