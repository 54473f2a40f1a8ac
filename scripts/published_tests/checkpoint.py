"""Checkpoints that foreign tests expect, made from the demo model.

`make_large`: with the ids of a large one. Ids beyond its tokenizer's are never drawn: they have the embedding of a special
token that no text of the training had. Their text is empty. What the model says is unchanged.

`make_other`: weights to change to, under the path that tests of weight updates name. It says something else. Beside it lies
what they change back to.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable

import ml_dtypes  # noqa: F401 (numpy learns bfloat16)
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxserve.demo import demo_model_path

_VOCAB_SIZE = 131072
_EMBEDDING = "model.embed_tokens.weight"
_OTHER = "meta-llama/Llama-3.2-1B"
_SAME = f"{_OTHER}-Instruct"


def make_large(folder: pathlib.Path) -> str:
    """Writes it, unless it is there, and returns its path."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        embedding = tensors[_EMBEDDING]
        more = np.repeat(embedding[-1:], _VOCAB_SIZE - len(embedding), axis=0)
        tensors[_EMBEDDING] = np.concatenate([embedding, more])

    return _make(folder / "model", {"vocab_size": _VOCAB_SIZE}, change)


def make_other(folder: pathlib.Path) -> str:
    """Writes it, unless it is there, and returns its path."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in tensors:
            if name.endswith("mlp.down_proj.weight"):
                tensors[name] = np.zeros_like(tensors[name])

    _make(folder / _SAME, {}, lambda tensors: None)
    return _make(folder / _OTHER, {}, change)


def _make(target: pathlib.Path, config: dict[str, int], change: Callable[[dict[str, np.ndarray]], None]) -> str:
    if not target.exists():
        partial = target.with_suffix(".partial")
        shutil.copytree(demo_model_path(), partial, dirs_exist_ok=True)
        before = json.loads((partial / "config.json").read_text())
        (partial / "config.json").write_text(json.dumps(before | config))
        tensors = load_file(partial / "model.safetensors")
        change(tensors)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        partial.rename(target)
    return str(target)
