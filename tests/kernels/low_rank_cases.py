"""Low-rank adapters for tests of what multiplies with them: drawn, and the sum written out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxserve.models.adapters.low_rank import LowRank


class Shape(NamedTuple):
    tokens: int
    size_in: int
    widths: tuple[int, ...]  # of the parts in a period
    periods: int
    slots: int
    rank: int


SHAPES = [
    Shape(1, 16, (16,), 1, 1, 1),
    Shape(7, 33, (5, 3, 2), 3, 4, 3),
    Shape(64, 192, (64, 32, 32), 4, 8, 16),
    Shape(300, 40, (70, 70), 1, 5, 9),
    Shape(9, 512, (192,), 1, 3, 20),
]


class Drawn(NamedTuple):
    adapters: LowRank
    base: np.ndarray  # [tokens, out]
    x: np.ndarray  # [tokens, in]
    slots: np.ndarray  # int32 [tokens]


def draw(shape: Shape) -> Drawn:
    rng = np.random.default_rng(shape.tokens)

    def normal(*sizes: int) -> np.ndarray:
        return rng.normal(size=sizes).astype(np.float32)

    a = normal(shape.slots, shape.size_in, len(shape.widths), shape.rank)
    b = tuple(normal(shape.slots, shape.rank, shape.periods * width) for width in shape.widths)
    slots = rng.integers(-1, shape.slots, shape.tokens).astype(np.int32)
    base = normal(shape.tokens, shape.periods * sum(shape.widths))
    return Drawn(LowRank(a, b, shape.widths), base, normal(shape.tokens, shape.size_in), slots)


def expected(drawn: Drawn) -> np.ndarray:
    """float64 [tokens, out]"""
    adapters, base, x, slots = drawn
    out = base.astype(np.float64)
    for token, slot in enumerate(slots):
        if slot >= 0:
            parts = [
                (x[token].astype(np.float64) @ adapters.a[slot, :, part] @ b[slot]).reshape(-1, width)
                for part, (b, width) in enumerate(zip(adapters.b, adapters.widths, strict=True))
            ]
            out[token] += np.concatenate(parts, axis=1).reshape(-1)
    return out
