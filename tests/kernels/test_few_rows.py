"""Products of few rows in C++ against NumPy."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from cpp_compiler import needs_compiler

from jaxserve.kernels.native.few_rows import MOST_ROWS, are_available, multiply_few_rows

pytestmark = needs_compiler

# [in, out]: of a real layer, of odd sizes, with less than a register, wider than a window, of less work than is worth threads
SHAPES = [(896, 1152), (1000, 333), (7, 5), (40, 20001), (64, 48), (9, 9000)]


def product(x: np.ndarray, matrix: np.ndarray, transposed: bool) -> np.ndarray:
    return np.asarray(multiply_few_rows(x, np.ascontiguousarray(matrix.T) if transposed else matrix, transposed=transposed))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_rows_gives_each_the_same_bits(shape: tuple[int, int], transposed: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((MOST_ROWS, shape[0]), np.float32)
    matrix = rng.standard_normal(shape, np.float32)
    exact = x.astype(np.float64) @ matrix.astype(np.float64)
    whole = product(x, matrix, transposed)
    np.testing.assert_allclose(whole, exact, atol=2e-6 * shape[0], rtol=0)
    for rows in range(1, MOST_ROWS):
        np.testing.assert_array_equal(product(x[-rows:], matrix, transposed), whole[-rows:])


def test_the_same_bits_every_time() -> None:
    """Whichever thread computes a part."""
    rng = np.random.default_rng(1)
    x, matrix = rng.standard_normal((3, 2432), np.float32), rng.standard_normal((2432, 896), np.float32)
    program = jax.jit(multiply_few_rows)
    first = np.asarray(program(x, matrix))
    for _ in range(20):
        np.testing.assert_array_equal(program(x, matrix), first)


def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    x, matrix = np.ones((4, 64), np.float32), np.ones((64, 40), np.float32)
    x[1, 5], matrix[3, 7] = np.nan, np.inf
    for transposed in (False, True):
        out = product(x, matrix, transposed)
        assert np.isnan(out[1]).all()
        others = np.delete(out, 1, axis=0)
        assert np.isinf(others[:, 7]).all()
        assert (np.delete(others, 7, axis=1) == 64).all()


def test_it_is_there() -> None:
    assert are_available()
