"""Lines of a step's logits, read to the host between its two halves and written back: for processors that are users' own code.

The logits stay on the device; what moves are the lines of the rows that somebody processes. Only servers that let users bring
code have these programs, two for each number of lines that a forward half hands on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.executor.forward_batch import Bucket

# Of one call.
MOVED_LINES = 8


class LogitsKey(NamedTuple):
    """What a program that moves lines of logits is compiled for."""

    num_lines: int  # of all logits
    writes: bool

    @property
    def name(self) -> str:
        return f"{'write' if self.writes else 'read'} logits {self.num_lines}"

    @staticmethod
    def all_of(buckets: Iterable[Bucket]) -> tuple[LogitsKey, ...]:
        counts = sorted({bucket.total_rows * bucket.tokens_per_row for bucket in buckets})
        return tuple(LogitsKey(count, writes) for count in counts for writes in (False, True))


def read_logits(logits: jax.Array, lines: jax.Array) -> jax.Array:
    """float32 [MOVED_LINES, V] of `logits` [L, V]."""
    return logits[lines]


def write_logits(logits: jax.Array, lines: jax.Array, changed: jax.Array) -> jax.Array:
    """`logits` [L, V] with `changed` [MOVED_LINES, V] in place of those lines; lines that do not exist are dropped."""
    return logits.at[lines].set(changed, mode="drop")


def parts_of(lines: np.ndarray) -> Iterator[slice]:
    """Of so many lines, those of each call."""
    for first in range(0, len(lines), MOVED_LINES):
        yield slice(first, first + MOVED_LINES)


def padded(lines: np.ndarray, fill: int) -> np.ndarray:
    """int32 [MOVED_LINES]."""
    whole = np.full(MOVED_LINES, fill, np.int32)
    whole[: len(lines)] = lines
    return whole


def padded_logits(logits: np.ndarray) -> np.ndarray:
    """float32 [MOVED_LINES, V]."""
    whole = np.zeros((MOVED_LINES, logits.shape[1]), np.float32)
    whole[: len(logits)] = logits
    return whole
