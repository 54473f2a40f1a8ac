"""GivenAdapters: folders of LoRA adapters that came in requests, as PEFT would have written them, in the engine's folder."""

from __future__ import annotations

import hashlib
import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.models.adapters.peft_files import CONFIG_FILE, WEIGHTS_FILE


class GivenAdapters:
    def __init__(self) -> None:
        self._folder = Path("adapters")
        self._writing = threading.Lock()  # what is written is written before its folder is removed, or never
        self._is_closed = False

    def open(self, folder: Path) -> None:
        """The engine's own, which goes with it."""
        self._folder = folder / "adapters"

    def close(self) -> None:
        with self._writing:
            self._is_closed = True

    def folder_of(self, name: str) -> Path:
        """The same whenever it is loaded: a replica that kept it, when loading failed in another one, takes it again."""
        return self._folder / hashlib.sha256(name.encode()).hexdigest()[:32]

    def reserve(self, folder: Path) -> bool:
        """Whether nobody has it yet."""
        self._folder.mkdir(exist_ok=True)
        try:
            folder.mkdir()
        except FileExistsError:
            return False
        return True

    def write(self, folder: Path, config: dict[str, Any], tensors: bytes) -> None:
        """Blocking; from any thread. OSError."""
        with self._writing:
            if self._is_closed:
                return
            (folder / CONFIG_FILE).write_bytes(msgspec.json.encode({"peft_type": "LORA", **config}))
            (folder / WEIGHTS_FILE).write_bytes(tensors)

    def remove(self, folder: Path) -> None:
        with self._writing:
            shutil.rmtree(folder, ignore_errors=True)
