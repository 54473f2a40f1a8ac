"""The custom call for low-rank adapters against the sum written out."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve.kernels.native.low_rank import add_low_rank
from jaxserve.models.adapters.low_rank import LowRank

# Tokens, in, widths of the parts in a period, periods, slots, rank.
SHAPES = [
    (1, 16, (16,), 1, 1, 1),
    (7, 33, (5, 3, 2), 3, 4, 3),
    (64, 192, (64, 32, 32), 4, 8, 16),
    (300, 40, (70, 70), 1, 5, 9),
    (9, 512, (192,), 1, 3, 20),
]


def draw(tokens: int, size_in: int, widths: tuple[int, ...], periods: int, slots: int, rank: int) -> tuple[LowRank, ...]:
    rng = np.random.default_rng(tokens)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    adapters = LowRank(
        normal(size_in, slots, len(widths), rank), tuple(normal(slots, rank, periods * width) for width in widths), widths
    )
    of_tokens = rng.integers(-1, slots, tokens).astype(np.int32)
    return adapters, normal(tokens, periods * sum(widths)), normal(tokens, size_in), of_tokens  # type: ignore[return-value]


def expected(adapters: LowRank, base: np.ndarray, x: np.ndarray, slots: np.ndarray) -> np.ndarray:
    out = base.astype(np.float64)
    for token, slot in enumerate(slots):
        if slot >= 0:
            parts = [
                (x[token].astype(np.float64) @ adapters.a[:, slot, part] @ b[slot]).reshape(-1, width)
                for part, (b, width) in enumerate(zip(adapters.b, adapters.widths, strict=True))
            ]
            out[token] += np.concatenate(parts, axis=1).reshape(-1)
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_it_and_xla_agree_with_the_sum(shape: tuple[int, int, tuple[int, ...], int, int, int]) -> None:
    adapters, base, x, slots = draw(*shape)
    wanted = expected(adapters, base, x, slots)  # type: ignore[arg-type]
    scale = np.abs(wanted).max()
    native = jax.jit(lambda base, x, slots: add_low_rank(base, x, slots, adapters.a, adapters.b, adapters.widths))
    np.testing.assert_allclose(native(base, x, slots), wanted, atol=1e-5 * scale)
    by_xla = jax.jit(lambda base, x, slots: base + adapters.product(x, slots))
    np.testing.assert_allclose(by_xla(base, x, slots), wanted, atol=1e-5 * scale)


def test_a_token_gets_the_same_to_the_last_bit_alone_and_in_a_crowd() -> None:
    adapters, base, x, slots = draw(*SHAPES[2])
    native = jax.jit(lambda base, x, slots: add_low_rank(base, x, slots, adapters.a, adapters.b, adapters.widths))
    of_all = np.asarray(native(base, x, slots))
    for token in (0, 5, 63):
        at = slice(token, token + 1)
        np.testing.assert_array_equal(native(base[at], x[at], slots[at]), of_all[at])  # type: ignore[index]


def test_tokens_without_an_adapter_stay() -> None:
    adapters, base, x, slots = draw(*SHAPES[3])
    native = jax.jit(lambda base, x, slots: add_low_rank(base, x, slots, adapters.a, adapters.b, adapters.widths))
    np.testing.assert_array_equal(np.asarray(native(base, x, slots))[slots == -1], base[slots == -1])  # type: ignore[index, operator]
