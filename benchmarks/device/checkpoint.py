"""The demo checkpoint with heads that GPU kernels take: the same model, its heads of 32 numbers spread over 64 with zeros."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxserve.demo import demo_model_path

WEIGHTS = "model.safetensors"
_LENGTH = struct.Struct("<Q")

_OLD, _NEW = 32, 64
# Rotary pairs are (i, i + D / 2) and turn by theta ** (-2 i / D): number i of 32 turns as number 2 i of 64.
_SPREAD = np.concatenate([2 * np.arange(_OLD // 2), 2 * np.arange(_OLD // 2) + _NEW // 2])


def widened_demo(folder: Path) -> Path:
    """Writes it into `folder` and returns that.

    With twice the numbers, half of them 0, an RMS norm gives the square root of 2 too much for keys and queries each, and the
    attention scale as much too little: so one of the two norms' weights is divided by it.
    """
    source = Path(demo_model_path())
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    assert config["head_dim"] == _OLD, config["head_dim"]
    (folder / "config.json").write_text(json.dumps({**config, "head_dim": _NEW}))
    arrays = {name: _widened(name, array) for name, array in read_arrays(source / WEIGHTS).items()}
    write_arrays(folder / WEIGHTS, arrays)
    return folder


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Of a safetensors file of bfloat16: the length of its header, that, and the bytes. The library has bfloat16 for frameworks
    alone, and JAX would take the GPU that a server is to have."""
    content = path.read_bytes()
    (length,) = _LENGTH.unpack_from(content)
    start = _LENGTH.size + length
    found = {}
    for name, entry in json.loads(content[_LENGTH.size : start]).items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", (path, name)
            first, last = entry["data_offsets"]
            found[name] = np.frombuffer(content[start + first : start + last], ml_dtypes.bfloat16).reshape(entry["shape"])
    return found


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    header, end = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": (end, end + array.nbytes)}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(_LENGTH.pack(len(text)) + text + b"".join(array.tobytes() for array in arrays.values()))


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
