"""ExpertRecord: how many tokens went to each expert, between a start and a stop.

The device counts always; a start remembers what it had counted by then. Sums wrap at 2**32, differences do not mind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxserve.commands import CommandError, DumpExpertRecord, ExpertRecordCommand, StartExpertRecord, StopExpertRecord


class ExpertRecord:
    def __init__(self, num_layers: int, sparse_layers: Sequence[int]) -> None:
        """`sparse_layers`: those with experts, in order."""
        self._num_layers = num_layers
        self._sparse_layers = list(sparse_layers)
        self._at_start: np.ndarray | None = None  # uint32 [layers with experts, experts]; None: nothing is being recorded
        self._recorded: np.ndarray | None = None  # what was, once it was stopped

    def carry_out(self, command: ExpertRecordCommand, counts: np.ndarray | None) -> None:
        """`counts` uint32 [layers with experts, experts]: the device's. Raises CommandError, OSError."""
        assert counts is not None, "the runner was built without counting"
        match command:
            case StartExpertRecord():
                self._at_start, self._recorded = counts, None
            case StopExpertRecord():
                self._recorded, self._at_start = self._so_far(counts), None
            case DumpExpertRecord(file):
                self._write(Path(file), self._so_far(counts) if self._recorded is None else self._recorded)
                self._at_start = self._recorded = None

    def _so_far(self, counts: np.ndarray) -> np.ndarray:
        if self._at_start is None:
            raise CommandError("No expert distribution is being recorded: /start_expert_distribution_record begins it.")
        return counts - self._at_start

    def _write(self, file: Path, recorded: np.ndarray) -> None:
        """As SGLang's --init-expert-location reads it: logical_count [layers, experts], 0 for layers without experts."""
        whole = np.zeros((self._num_layers, recorded.shape[1]), np.uint32)
        whole[self._sparse_layers] = recorded
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(".partial")
        beside.write_text(json.dumps({"logical_count": whole.tolist()}), encoding="utf-8")
        os.replace(beside, file)
