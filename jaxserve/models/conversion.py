"""`jaxserve convert`: a safetensors checkpoint becomes a model folder whose weights are an Orbax checkpoint of our layout."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.models.arrays import ALL_AXES
from jaxserve.models.config import ModelConfig
from jaxserve.models.json_files import read_json
from jaxserve.models.loading import load_params
from jaxserve.models.orbax_files import find_orbax, save_params

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_FALLBACK_DTYPE = "bfloat16"  # for checkpoints of types the runtime does not compute in, such as float16


def convert(model_path: str | Path, out_dir: str | Path, dtype: str = "auto", *, progress: bool = True) -> Path:
    """Writes `out_dir` (config, tokenizer files, orbax/) and returns it. dtype: auto (the checkpoint's), float32 or bfloat16.

    ValueError if `out_dir` already holds converted weights, or is the source itself. Whatever fails, or Ctrl-C, leaves
    nothing behind.
    """
    source, target = Path(model_path), Path(out_dir)
    if source.resolve() == target.resolve():
        raise ValueError(f"the output folder must not be the model's own, got {target}.")
    if find_orbax(target) is not None:
        raise ValueError(f"{target} already holds converted weights; remove them or choose another folder.")
    config = ModelConfig.from_pretrained(source)
    chosen = _choose_dtype(config, dtype)
    mesh = Mesh(np.asarray(jax.local_devices(backend="cpu")[:1]).reshape(1, 1), ALL_AXES)
    params = load_params(source, config, mesh, chosen, progress=progress)
    with _whole_or_nothing(target):
        _check_space(target, sum(array.nbytes for array in jax.tree.leaves(params)))
        save_params(target, params)
        _copy_other_files(source, target, chosen)
    return target


@contextlib.contextmanager
def _whole_or_nothing(folder: Path) -> Iterator[None]:
    """Makes the folder; removes it, or what has been added to it, if the block fails."""
    was_there = folder.is_dir()
    before = set(folder.iterdir()) if was_there else set()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in set(folder.iterdir()) - before:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if not was_there:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _check_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        needed = f"{num_bytes / 2**30:.2f} GiB are needed, {free / 2**30:.2f} GiB are free"
        raise ValueError(f"{folder} cannot hold the weights: {needed} on its disk.")


def _choose_dtype(config: ModelConfig, dtype: str) -> str:
    if dtype == "auto":
        return config.dtype if config.dtype in ("float32", "bfloat16") else _FALLBACK_DTYPE
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be auto, float32 or bfloat16; got {dtype!r}.")
    return dtype


def _copy_other_files(source: Path, target: Path, dtype: str) -> None:
    """Everything beside the weights, and what modules of sentence-transformers have; config.json says the new type."""
    for path in (*sorted(source.iterdir()), *sorted(source.glob("[0-9]_*/config.json"))):
        is_weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        copied = target / path.relative_to(source)
        if path.is_file() and not is_weights and copied != target / "config.json":
            copied.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copied)
    raw = read_json(source / "config.json", required=True)
    raw.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps({**raw, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")
