"""Whether hosts have the same weights in their folders: else their devices would compute with parts of different models.

Looked at are names, sizes and a few blocks of each file, so that it takes milliseconds. Training changes all of a file; this is
for copies that are old, and caches of network file systems that are behind.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

_BLOCKS, _BLOCK_BYTES = 16, 4096  # of each file, at equal distances


def fingerprint(folder: str, load_format: str) -> str:
    """Of a model folder's config and weights, wherever it lies. What cannot be read is for others to complain of."""
    return _digest(folder, _files(Path(folder), with_weights=load_format != "dummy"))


def adapter_fingerprint(folder: str) -> str:
    """Of a LoRA adapter's folder, in the same way."""
    return _digest(folder, [Path(folder) / "adapter_config.json", *sorted(Path(folder).glob("*.safetensors"))])


def _digest(folder: str, files: list[Path]) -> str:
    digest = hashlib.sha256()
    with contextlib.suppress(OSError):
        for path in files:
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
            for block in _some_of(path):
                digest.update(block)
    return digest.hexdigest()


def _files(folder: Path, *, with_weights: bool) -> list[Path]:
    weights = [*folder.glob("*.safetensors"), *(path for path in folder.glob("orbax/**/*") if path.is_file())]
    return [folder / "config.json", *sorted(weights if with_weights else [])]


def _some_of(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        for index in range(_BLOCKS):
            file.seek(max(size - _BLOCK_BYTES, 0) * index // (_BLOCKS - 1))
            yield file.read(_BLOCK_BYTES)
