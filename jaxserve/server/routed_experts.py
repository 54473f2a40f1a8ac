"""The experts of tokens, as replies have them."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np


def packed_experts(parts: Sequence[np.ndarray]) -> str:
    """SGLang's: base64 of int32 [tokens, layers with experts, K], little-endian."""
    return base64.b64encode(np.concatenate(parts).astype("<i4", copy=False).tobytes()).decode()
