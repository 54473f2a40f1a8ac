"""GivenAdapters: folders of LoRA adapters that came in requests, as PEFT would have written them, in the engine's folder."""

from __future__ import annotations

import hashlib
import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec


class GivenAdapter:
    """One of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()  # it is written before it is removed, or never
        self._is_removed = False

    def write(self, config: dict[str, Any], tensors: bytes) -> None:
        """Blocking; from any thread. OSError."""
        with self._lock:
            if self._is_removed:
                return
            self.folder.mkdir(parents=True)
            (self.folder / "adapter_config.json").write_bytes(msgspec.json.encode({"peft_type": "LORA", **config}))
            (self.folder / "adapter_model.safetensors").write_bytes(tensors)

    def remove(self) -> None:
        with self._lock:
            self._is_removed = True
            shutil.rmtree(self.folder, ignore_errors=True)


class GivenAdapters:
    """By name, those that are loaded, or about to be."""

    def __init__(self) -> None:
        self._folder = Path("adapters")
        self._adapters: dict[str, GivenAdapter] = {}

    def open(self, folder: Path) -> None:
        """The engine's own, which goes with it."""
        self._folder = folder / "adapters"

    def close(self) -> None:
        """Nothing is written any more."""
        for name in list(self._adapters):
            self.remove(name)

    def add(self, name: str) -> GivenAdapter | None:
        """None: there is one. The folder of a name is always the same: a replica that kept an adapter which others could not
        load takes another try for what it is."""
        if name in self._adapters:
            return None
        folder = self._folder / hashlib.sha256(name.encode()).hexdigest()[:32]  # names may be no file names
        return self._adapters.setdefault(name, GivenAdapter(folder))

    def remove(self, name: str) -> None:
        """If it is one of them."""
        if (adapter := self._adapters.pop(name, None)) is not None:
            adapter.remove()
