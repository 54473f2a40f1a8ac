"""Reads slices of named tensors from a Hugging Face checkpoint folder: one safetensors file or several.

Knows files and names; not what a tensor is for. Whatever is wrong with a file becomes a CheckpointError that names the file
and, where there is one, the tensor. Files are memory-mapped: only the slices asked for are read. Safe to use from threads.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# sentence-transformers' modules have folders, such as 2_Dense: tensor x of one's file is called 2_Dense.x here.
_MODULE_FILES = f"[0-9]_*/{SINGLE_FILE}"
# How names of a model's tensors begin, and how instead in files of models that also take images, of models that were saved
# without a head, and of encoders.
_PREFIX = "model."
_OTHER_PREFIXES = ("language_model.model.", "model.language_model.", "", "bert.", "roberta.", "distilbert.", "nomic_bert.")
# What TensorFlow called the arrays of a norm.
_OTHER_ENDINGS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_READABLE_TYPES = tuple(_TYPES)
_LENGTH_BYTES = 8  # that a file begins with: how long the header behind them is
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")


class CheckpointError(ValueError):
    """Weights that are missing or damaged or do not fit the config, in a sentence for the user."""


class SafetensorsCheckpoint:
    def __init__(self, folder: Path) -> None:
        """Finds the files and opens those it must; CheckpointError if there are none or the index is damaged."""
        self._folder = folder
        self._lock = threading.Lock()
        self._handles: dict[Path, Any] = {}
        self._offsets_of: dict[Path, dict[str, int]] = {}
        self._listing, self._file_of = self._find_files()
        self._file_of |= self._find_modules()

    def has(self, name: str) -> bool:
        return self._name_in_file(name) in self._file_of

    def check(self, name: str, shape: tuple[int, ...], types: tuple[str, ...] = _READABLE_TYPES) -> None:
        """CheckpointError unless tensor `name` is there with this shape and one of `types`, in the files' words."""
        path, tensor = self._tensor(name)
        found = tuple(tensor.get_shape())
        if found != shape:
            raise CheckpointError(f"{path}: tensor {name} has shape {list(found)}, but config.json asks for {list(shape)}.")
        if tensor.get_dtype() not in types:
            raise CheckpointError(
                f"{path}: tensor {name} has type {tensor.get_dtype()}; types that can be read: {', '.join(types)}."
            )

    def type_of(self, name: str) -> str:
        """In the file's words: BF16, F8_E4M3. CheckpointError if there is no such tensor."""
        return str(self._tensor(name)[1].get_dtype())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a tensor, in the file's type."""
        path, tensor = self._tensor(name)
        try:
            return tensor[index]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from error

    def read_bytes(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """The same, uint8, of a type with one byte for each number, which NumPy need not know."""
        path, tensor = self._tensor(name)
        try:
            offset = self._offsets(path)[self._name_in_file(name)]
            whole = np.memmap(path, np.uint8, "r", offset=offset, shape=tuple(tensor.get_shape()))
            return np.array(whole[index])
        except (OSError, ValueError, LookupError) as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from error

    def _offsets(self, path: Path) -> dict[str, int]:
        """Where in the file each tensor begins."""
        with self._lock:
            if path not in self._offsets_of:
                with path.open("rb") as file:
                    header_len = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                    header = json.loads(file.read(header_len))
                begin = _LENGTH_BYTES + header_len
                self._offsets_of[path] = {
                    name: begin + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"
                }
            return self._offsets_of[path]

    def _tensor(self, name: str) -> tuple[Path, Any]:
        name = self._name_in_file(name)
        path = self._file_of.get(name)
        if path is None:
            module = name.partition(".")[0]
            hint = _other_weights(self._folder / module, module)
            raise CheckpointError(f"{self._listing}: tensor {name} is missing.{hint}")
        handle = self._open(path)
        try:
            return path, handle.get_slice(name if path.parent == self._folder else name.removeprefix(f"{path.parent.name}."))
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor {name} is missing ({error}).") from error

    def _name_in_file(self, name: str) -> str:
        """Of the tensor that is called `name` in a checkpoint of nothing but the language model and its head."""
        return next((other for other in spellings(name) if other in self._file_of), name)

    def _open(self, path: Path) -> Any:
        with self._lock:
            if path not in self._handles:
                self._handles[path] = _open_file(path)
            return self._handles[path]

    def _find_files(self) -> tuple[Path, dict[str, Path]]:
        """What lists the tensors (for messages), and the file of each tensor."""
        if not self._folder.is_dir():
            raise CheckpointError(f"{self._folder} is not a folder; model_path must be a folder with a checkpoint.")
        single, index = self._folder / SINGLE_FILE, self._folder / INDEX_FILE
        if single.is_file():
            return single, dict.fromkeys(self._open(single).keys(), single)
        if index.is_file():
            return index, self._read_index(index)
        files = sorted(self._folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(_no_weights(self._folder))
        return self._folder, {name: path for path in files for name in self._open(path).keys()}  # noqa: SIM118

    def _find_modules(self) -> dict[str, Path]:
        files = self._folder.glob(_MODULE_FILES)
        return {f"{path.parent.name}.{name}": path for path in files for name in self._open(path).keys()}  # noqa: SIM118

    def _read_index(self, index: Path) -> dict[str, Path]:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            file_of = {str(name): self._folder / file for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a valid index of safetensors files ({error!r}).") from error
        for name, path in file_of.items():
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; {INDEX_FILE} says that it holds tensor {name}.")
        return file_of


def spellings(name: str) -> Iterator[str]:
    """What a tensor may be called, its own name first."""
    names = [name]
    names += [name.removesuffix(ending) + other for ending, other in _OTHER_ENDINGS.items() if name.endswith(ending)]
    yield from names
    if name.startswith(_PREFIX):
        yield from (prefix + other.removeprefix(_PREFIX) for prefix in _OTHER_PREFIXES for other in names)


def tensors_in(data: bytes) -> dict[str, np.ndarray]:
    """Of a safetensors file that is in memory. ValueError with a sentence if it is none, or a type cannot be read."""
    try:
        entries = dict(deserialize(data))
    except SafetensorError as error:
        raise ValueError(f"The {len(data)} bytes must be a whole safetensors file: {error}") from error
    for name, entry in entries.items():
        if entry["dtype"] not in _TYPES:
            raise ValueError(f"The type of tensor {name} must be one of {', '.join(_READABLE_TYPES)}; got {entry['dtype']}.")
    return {
        name: np.frombuffer(entry["data"], _TYPES[entry["dtype"]]).reshape(entry["shape"]) for name, entry in entries.items()
    }


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise CheckpointError(f"{path} ({size} bytes) is cut off or not a safetensors file: {error}") from error


def _no_weights(folder: Path) -> str:
    expected = f"{SINGLE_FILE}, {INDEX_FILE} with its files, or an orbax folder"
    return f"{folder} holds no weights: expected {expected}.{_other_weights(folder, 'It')}"


def _other_weights(folder: Path, called: str) -> str:
    """A sentence, if a folder has some in formats that are not read."""
    others = sorted(path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern))
    return f" {called} holds {', '.join(others[:3])}, which is not read; convert it to safetensors." if others else ""
