"""Every LatentBackend by its interface, against attention whose values are the first part of its keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Heads, Step, expected, make_step, nan_pool, spec_of
from tpu_interpreter import INTERPRET, SMALL, fail_on_races

from jaxserve.kernels.api import AttentionSpec, Chip, LatentBackend, choose_latent_backend
from jaxserve.kernels.pallas.tpu.backend import PallasTpuLatentAttention
from jaxserve.kernels.pallas.tpu.tuning import CHIPS
from jaxserve.kernels.reference_latent import ReferenceLatentAttention

no_races = pytest.fixture(autouse=True)(fail_on_races)

LATENT_DIM, ROW_DIM = 32, 48
BINDS: dict[str, Callable[[AttentionSpec], LatentBackend]] = {
    "reference": ReferenceLatentAttention,
    "tpu": functools.partial(PallasTpuLatentAttention, interpret=INTERPRET, override=SMALL),
}


def run_latent(backend: LatentBackend, step: Step) -> np.ndarray:
    """float32 [T, H, LATENT_DIM], of the second of two layers whose pages hold NaN but for what the step may see."""
    offset = jnp.int32(step.num_pages)

    @functools.partial(jax.jit, static_argnames="decode_q_len")
    def layer(pool: Any, rows: jax.Array, q: jax.Array, arguments: Any, decode_q_len: int | None) -> Any:
        metadata = backend.plan(**arguments, decode_q_len=decode_q_len)
        pool = backend.write(rows, pool, metadata, offset)
        return backend.attend(q, pool, metadata, offset, scale=step.heads.dim**-0.5), pool

    before = step.before(32)
    pool = nan_pool(backend, 2 * step.num_pages)  # type: ignore[arg-type]
    _, pool = layer(pool, before.new(step.keys)[:, 0], before.q, before.plan_arguments(), None)
    out, _ = layer(pool, step.new(step.keys)[:, 0], step.q, step.plan_arguments(), step.decode_q_len)
    return np.asarray(out)


@pytest.mark.parametrize("bind", BINDS.values(), ids=BINDS)
@pytest.mark.parametrize("decode_q_len", [1, None])
def test_attention_over_latents(bind: Callable[[AttentionSpec], LatentBackend], decode_q_len: int | None) -> None:
    rows = ((1, 9), (0, 0), (1, 20)) if decode_q_len else ((1, 17), (0, 0), (9, 20), (2, 2))
    step = make_step(rows, Heads(4, 1, ROW_DIM), num_tokens=16, decode_q_len=decode_q_len)
    step = dataclasses.replace(step, values=step.keys)
    out = run_latent(bind(spec_of(step, jnp.float32, latent_dim=LATENT_DIM)), step)
    np.testing.assert_allclose(out, expected(step)[..., :LATENT_DIM], atol=2e-6, rtol=0)


def deepseek(chip: Chip, **changes: Any) -> AttentionSpec:
    spec = AttentionSpec(chip, 16, 1, 576, "bfloat16", "bfloat16", latent_dim=512)
    return dataclasses.replace(spec, **changes)


@pytest.mark.parametrize("kind", CHIPS)
def test_on_tpus_the_kernels_are_chosen_and_a_row_is_padded_to_whole_lanes(kind: str) -> None:
    backend = choose_latent_backend("auto", deepseek(Chip("tpu", kind)))
    assert isinstance(backend, PallasTpuLatentAttention)
    assert backend.kv_pages().pool.shape == (1, 128, 640)
    assert backend.config.vmem_limit_bytes is not None


def test_elsewhere_it_is_the_reference_and_a_name_insists() -> None:
    for platform in ("cpu", "gpu"):
        assert choose_latent_backend("auto", deepseek(Chip(platform))).name == "reference"
    with pytest.raises(NotImplementedError, match="runs on gpu or tpu, this device is a cpu"):
        choose_latent_backend("pallas", deepseek(Chip("cpu")))
    with pytest.raises(NotImplementedError, match="this GPU is another vendor's"):
        choose_latent_backend("pallas", deepseek(Chip("gpu")))
    with pytest.raises(NotImplementedError, match=r"page_size must be a power of two .* got 48"):
        choose_latent_backend("pallas", deepseek(Chip("tpu", next(iter(CHIPS))), page_size=48))
