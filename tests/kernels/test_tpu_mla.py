"""Latent attention of the TPU kernels, interpreted, against attention whose values are the first part of its keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Heads, Step, expected, make_step, rounded
from tpu_interpreter import INTERPRET, SMALL, WIDE, fail_on_races

from jaxserve.kernels.pallas.tpu.attention import paged_attention
from jaxserve.kernels.pallas.tpu.layout import RowLayout
from jaxserve.kernels.pallas.tpu.mla import mla_config, write_latents
from jaxserve.kernels.pallas.tpu.plan import plan_step
from jaxserve.kernels.pallas.tpu.tuning import CHIPS, TpuConfig

no_races = pytest.fixture(autouse=True)(fail_on_races)


def mla_step(rows: Any, heads: int, key_dim: int, **more: Any) -> Step:
    step = make_step(rows, Heads(heads, 1, key_dim), **more)
    return dataclasses.replace(step, values=step.keys)


def write_and_attend(
    step: Step, latent_dim: int, config: TpuConfig, dtype: Any, kv_dtype: Any, poison: float = np.nan
) -> np.ndarray:
    """float32 [T, H, latent_dim], from a pool of `poison` but for what came before and the step's own tokens."""
    layout = RowLayout.latent(latent_dim, step.heads.dim - latent_dim)
    pool = jnp.full((step.num_pages, *layout.page_shape(1, step.page_size)), poison).astype(kv_dtype)
    scales = None if dtype == kv_dtype else jnp.full((step.num_pages, 2, step.page_size), poison)

    @jax.jit
    def layer(pool: Any, scales: Any, keys: jax.Array, q: jax.Array | None, arguments: Any) -> Any:
        names = ("kv_lens", "cu_q_lens", "page_table", "slot_pages", "slot_offsets")
        q_len = None if q is None else step.decode_q_len
        plan = plan_step(*(arguments[name] for name in names), decode_q_len=q_len, page_size=step.page_size, config=config)
        new = keys[:, 0, :latent_dim], keys[:, 0, latent_dim:]
        pool, scales = write_latents(pool, scales, *new, plan.write, jnp.int32(0), interpret=INTERPRET)
        if q is None:
            return pool, scales
        options: dict[str, Any] = {"layout": layout, "scale": step.heads.dim**-0.5, "interpret": INTERPRET}
        return paged_attention(q, pool, scales, plan, 0, **options)

    before = step.before(64)
    pool, scales = layer(pool, scales, jnp.asarray(before.new(step.keys), dtype), None, before.plan_arguments())
    q, keys = jnp.asarray(step.q, dtype), jnp.asarray(step.new(step.keys), dtype)
    return np.asarray(layer(pool, scales, keys, q, step.plan_arguments()), np.float32)


@pytest.mark.matrix
@pytest.mark.parametrize("poison", [np.nan, 1e4])
@pytest.mark.parametrize("decode_q_len", [1, None])
def test_latent_attention(decode_q_len: int | None, poison: float) -> None:
    """Nothing of the slots that hold no token of the row is seen, be it NaN or another request's."""
    rows = ((1, 9), (0, 0), (1, 20)) if decode_q_len else ((1, 17), (0, 0), (9, 20), (2, 2))
    step = mla_step(rows, 4, 48, num_tokens=16, decode_q_len=decode_q_len)
    got = write_and_attend(step, 32, SMALL, jnp.float32, jnp.float32, poison)
    np.testing.assert_allclose(got, expected(step)[..., :32], atol=2e-6, rtol=0)


@pytest.mark.parametrize(("kv_dtype", "error"), [("bfloat16", 1e-2), ("float8_e4m3fn", 5e-2)])
def test_the_rows_of_deepseek(kv_dtype: str, error: float) -> None:
    step = rounded(mla_step(((1, 130), (3, 9)), 4, 576, page_size=128, num_tokens=8), jnp.bfloat16)
    got = write_and_attend(step, 512, WIDE, jnp.bfloat16, jnp.dtype(kv_dtype))
    want = expected(step)[..., :512]
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < error


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("num_heads", [16, 128])
def test_something_fits(chip: str, num_heads: int) -> None:
    config = mla_config(num_heads, RowLayout.latent(512, 64), 128, "bfloat16", "bfloat16", chip)
    assert config.vmem_limit_bytes is not None and config.vmem_limit_bytes < CHIPS[chip].vmem_bytes
