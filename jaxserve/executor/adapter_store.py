"""AdapterStore: LoRA adapters in the host's memory, as they go into slots of the devices."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.models.adapters.layout import AdapterLayout, as_named_here, check
from jaxserve.models.adapters.peft_files import read_adapter

logger = logging.getLogger(__name__)


class AdapterStore:
    """Filled by the thread of commands, read by that of steps."""

    def __init__(self, layouts: Sequence[AdapterLayout], modules: Mapping[str, tuple[int, int]]) -> None:
        """`layouts`: of the stages on this host; `modules`: name -> [out, in] of all that an adapter may change, in all
        stages."""
        self._layouts = layouts
        self._modules = modules
        self._filled: dict[int, list[Any]] = {}  # by the adapter's id: of each stage here

    def read(self, adapter_id: int, path: str) -> None:
        """ValueError or OSError with a sentence if it is no adapter of this model, or too large for a slot."""
        started_s = time.monotonic()
        adapter = as_named_here(read_adapter(path), self._modules)
        check(adapter, self._modules, self._layouts[0].rank, path)
        self._filled[adapter_id] = [layout.filled(adapter) for layout in self._layouts]
        logger.info("Adapter %s: rank %d, read in %.2f s", path, adapter.rank, time.monotonic() - started_s)

    def forget(self, adapter_id: int) -> None:
        del self._filled[adapter_id]

    def filled(self, adapter_id: int) -> list[Any]:
        """Of each stage here what goes into a slot: NumPy arrays."""
        return self._filled[adapter_id]
