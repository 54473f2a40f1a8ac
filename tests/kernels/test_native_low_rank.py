"""The custom call for low-rank adapters against the sum written out."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from low_rank_cases import SHAPES, Shape, draw, expected

from jaxserve.kernels.native.low_rank import add_low_rank


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_and_xla_agree_with_the_sum(shape: Shape) -> None:
    drawn = draw(shape)
    (adapters, base, x, slots), wanted = drawn, expected(drawn)
    scale = np.abs(wanted).max()
    native = jax.jit(lambda base, x, slots: add_low_rank(base, x, slots, adapters.a, adapters.b, adapters.widths))
    np.testing.assert_allclose(native(base, x, slots), wanted, atol=1e-5 * scale)
    by_xla = jax.jit(lambda base, x, slots: base + adapters.product(x, slots))
    np.testing.assert_allclose(by_xla(base, x, slots), wanted, atol=1e-5 * scale)


def test_a_token_gets_the_same_to_the_last_bit_alone_and_in_a_crowd() -> None:
    adapters, base, x, slots = draw(SHAPES[2])
    native = jax.jit(lambda base, x, slots: add_low_rank(base, x, slots, adapters.a, adapters.b, adapters.widths))
    of_all = np.asarray(native(base, x, slots))
    for token in (0, 5, 63):
        at = slice(token, token + 1)
        np.testing.assert_array_equal(native(base[at], x[at], slots[at]), of_all[at])


def test_tokens_without_an_adapter_stay() -> None:
    adapters, base, x, slots = draw(SHAPES[3])
    native = jax.jit(lambda base, x, slots: add_low_rank(base, x, slots, adapters.a, adapters.b, adapters.widths))
    np.testing.assert_array_equal(np.asarray(native(base, x, slots))[slots == -1], base[slots == -1])
