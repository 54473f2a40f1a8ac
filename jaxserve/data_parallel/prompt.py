"""A prompt as routing sees it: its length, and hashes of its beginnings."""

from __future__ import annotations

import functools
import hashlib

import numpy as np

# Tokens from one hash to the next: what two prompts share counts in whole blocks.
BLOCK_TOKENS = 32
# Odd numbers without a pattern, so that tokens and places mix well.
_MIX, _BASE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


class Prompt:
    __slots__ = ("_hashes", "_ids", "_namespace", "length")

    def __init__(self, ids: np.ndarray, namespace: str | None = None) -> None:
        """`ids` int32 [length]. Prompts of different `namespace`s share nothing (the radix cache's extra_key)."""
        self.length = len(ids)
        self._ids = ids
        self._namespace = namespace
        self._hashes: list[int] | None = None

    @staticmethod
    def of_hashes(hashes: np.ndarray) -> Prompt:
        """As another process sees it, which sent its `hashes`."""
        prompt = Prompt(np.zeros(0, np.int32))
        prompt.length, prompt._hashes = len(hashes) * BLOCK_TOKENS, hashes.tolist()
        return prompt

    @property
    def hashes(self) -> list[int]:
        """Entry i is of the first (i + 1) * BLOCK_TOKENS tokens. Equal ones are, but for accidents, those of equal tokens: good
        enough to choose a replica by, and for nothing else."""
        if self._hashes is None:
            self._hashes = _prefix_hashes(self._ids, self._namespace)
        return self._hashes


def _prefix_hashes(ids: np.ndarray, namespace: str | None) -> list[int]:
    """Sums of mixed tokens, each times a power that belongs to its place, modulo 2**64: all prefixes in one pass."""
    num_tokens = len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
    tokens = (ids[:num_tokens].astype(np.uint64) + np.uint64(1)) * _MIX
    tokens ^= tokens >> np.uint64(29)
    sums = np.cumsum(tokens * _powers(_power_of_two(num_tokens))[:num_tokens], dtype=np.uint64)[
        BLOCK_TOKENS - 1 :: BLOCK_TOKENS
    ]
    return (sums ^ np.uint64(_salt(namespace))).tolist()


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 1023).bit_length()


@functools.cache
def _powers(count: int) -> np.ndarray:
    """uint64 [count]; a few lengths, so that few are kept."""
    return np.multiply.accumulate(np.full(count, _BASE))


@functools.lru_cache(1024)
def _salt(namespace: str | None) -> int:
    digest = hashlib.blake2b((namespace or "").encode(errors="surrogatepass"), digest_size=8).digest()
    return 0 if namespace is None else int.from_bytes(digest)
