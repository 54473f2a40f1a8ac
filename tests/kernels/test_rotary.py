"""Norms, rotation and row quantization against their definitions, in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.rotary import Rotary, quantize_rows, quantized_max, split_and_rotate

T, KV_HEADS, GROUP, DIM, EPS = 5, 2, 3, 16, 1e-5


def rotated(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """[T, H, D] as complex numbers x[i] + j x[i + D / 2], turned by angles [T, D / 2]."""
    turned = (x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], -1)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_split_and_rotate(dtype: str, norms: bool) -> None:
    rng = np.random.default_rng()
    qkv = jnp.asarray(rng.standard_normal((T, KV_HEADS, GROUP + 2, DIM)), dtype)
    angles = rng.uniform(0, 6.28, (T, DIM // 2))
    weights = [jnp.asarray(rng.uniform(0.5, 1.5, DIM), dtype) if norms else None for _ in range(2)]
    rotary = Rotary(jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32), *weights, eps=EPS)
    q, k, v = jax.jit(split_and_rotate)(qkv, rotary)
    wide = np.asarray(qkv, np.float64)
    wants = [wide[:, :, :GROUP].reshape(T, -1, DIM), wide[:, :, GROUP]]
    for got, x, weight in zip((q, k), wants, weights, strict=True):
        if weight is not None:
            x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * np.asarray(weight, np.float64)
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got, np.float64), rotated(x, angles), atol=1e-5 if dtype == "float32" else 0.05)
    assert jnp.array_equal(v, qkv[:, :, -1])


def test_without_rotary_the_heads_are_only_split() -> None:
    qkv = jnp.arange(T * KV_HEADS * (GROUP + 2) * DIM, dtype=jnp.float32).reshape(T, KV_HEADS, GROUP + 2, DIM)
    q, k, v = split_and_rotate(qkv, None)
    assert q.shape == (T, KV_HEADS * GROUP, DIM)
    assert (
        jnp.array_equal(q[:, GROUP], qkv[:, 1, 0]) and jnp.array_equal(k, qkv[:, :, -2]) and jnp.array_equal(v, qkv[:, :, -1])
    )


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e4])
def test_quantized_rows_read_back(dtype: str, magnitude: float) -> None:
    x = jnp.asarray(np.random.default_rng().standard_normal((7, 3, 64)) * magnitude, jnp.bfloat16)
    values, scales = jax.jit(quantize_rows, static_argnums=1)(x, dtype)
    assert values.dtype == dtype and scales.dtype == jnp.float32 and scales.shape == (7, 3)
    wide = np.asarray(x, np.float64)
    peaks = np.abs(wide).max(-1)
    np.testing.assert_allclose(np.asarray(scales), peaks / quantized_max(dtype), rtol=1e-6)
    error = np.abs(np.asarray(values, np.float64) * np.asarray(scales, np.float64)[..., None] - wide)
    if dtype == "int8":
        assert np.all(error <= 0.501 / 127 * peaks[..., None])
    else:  # three bits of mantissa, down to a subnormal step of 2**-9
        assert np.all(error <= np.maximum(np.abs(wide) * 2.0**-4, 2.0**-10 / 448 * peaks[..., None]) * 1.001)
    assert np.all(np.abs(np.asarray(values, np.float64)).max(-1) == quantized_max(dtype))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_quantized_rows_of_zeros_and_of_what_is_not_finite(dtype: str) -> None:
    x = jnp.ones((4, 8)).at[0].set(0).at[1].set(1e-38).at[2, 3].set(jnp.nan).at[3, 1].set(-jnp.inf)
    values, scales = quantize_rows(x, dtype)
    assert scales[:2].tolist() == [1, 1] and not np.asarray(values[:2], np.float32).any()
    assert jnp.isnan(scales[2]) and jnp.isinf(scales[3])
    back = np.asarray(values.astype(jnp.float32) * scales[:, None])
    assert not np.isfinite(back[2:]).any()


def test_rounding_is_to_the_nearest_even() -> None:
    values, scales = quantize_rows(jnp.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]), "int8")
    assert values[0].tolist() == [127, 0, 2, 2, 0, -2] and scales.tolist() == [1]


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="not to int4"):
        quantize_rows(jnp.ones((2, 8)), "int4")
