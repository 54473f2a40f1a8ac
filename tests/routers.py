"""The experts that the routers of Transformers choose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import load_model


def chosen_experts(folder: Path, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Of each sequence int32 [tokens - 1, layers with experts, K], best first; its last token is in no step."""
    oracle = load_model(folder)
    chosen: list[torch.Tensor] = []

    def note(module: Any, inputs: Any, outputs: Any) -> None:
        _, _, experts = outputs
        chosen.append(experts)

    for layer in oracle.model.layers:
        if hasattr(layer.mlp, "gate") and hasattr(layer.mlp, "experts"):
            layer.mlp.gate.register_forward_hook(note)
    found = []
    for sequence in sequences:
        chosen.clear()
        with torch.inference_mode():
            oracle(torch.tensor([list(sequence[:-1])]))
        found.append(torch.stack(chosen, dim=1).numpy().astype(np.int32))
    return found


def assert_same_experts(folder: Path, sequences: Sequence[Sequence[int]], starts: Sequence[int], found: Sequence[Any]) -> None:
    """`found` are those of each sequence from its start on."""
    for expected, start, experts in zip(chosen_experts(folder, sequences), starts, found, strict=True):
        assert experts.dtype == np.int32
        np.testing.assert_array_equal(experts, expected[start:])
