"""The demo model as foreign tests expect a model to be: with the ids of a large one.

Ids beyond its tokenizer's are never drawn: they have the embedding of a special token that no text of the training had.
Their text is empty. What the model says is unchanged.
"""

from __future__ import annotations

import json
import pathlib
import shutil

import ml_dtypes  # noqa: F401 (numpy learns bfloat16)
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxserve.demo import demo_model_path

_VOCAB_SIZE = 131072
_EMBEDDING = "model.embed_tokens.weight"


def make_large(folder: pathlib.Path) -> str:
    """Writes it, unless it is there, and returns its path."""
    target = folder / "model"
    if not target.exists():
        partial = folder / "model.partial"
        shutil.copytree(demo_model_path(), partial, dirs_exist_ok=True)
        config = json.loads((partial / "config.json").read_text())
        (partial / "config.json").write_text(json.dumps(config | {"vocab_size": _VOCAB_SIZE}))
        tensors = load_file(partial / "model.safetensors")
        embedding = tensors[_EMBEDDING]
        more = np.repeat(embedding[-1:], _VOCAB_SIZE - len(embedding), axis=0)
        tensors[_EMBEDDING] = np.concatenate([embedding, more])
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        partial.rename(target)
    return str(target)
