"""Token masks: one bit per token of the vocabulary, packed into ceil(V / 32) int32 words.

Token t is bit t % 32 (least significant first) of word t // 32; a set bit means that the token may come next. Bits beyond the
vocabulary are unset, except where everything is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def is_allowed(mask: np.ndarray, token_id: int) -> bool:
    return bool(mask[token_id // 32] >> (token_id % 32) & 1)


def allow_only(mask: np.ndarray, token_ids: Iterable[int]) -> None:
    words = mask.view(np.uint32)
    words[:] = 0
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)


def hold_back(mask: np.ndarray, token_ids: Iterable[int]) -> None:
    """Forbids tokens (stop tokens before min_new_tokens), unless no other token would be left."""
    words = mask.view(np.uint32)
    before: dict[int, int] = {}
    for token_id in token_ids:
        word, bit = token_id // 32, 1 << token_id % 32
        bits = words.item(word)
        if bits & bit:
            before.setdefault(word, bits)
            words[word] = bits ^ bit
    if before and not mask.any():
        for word, bits in before.items():
            words[word] = bits
