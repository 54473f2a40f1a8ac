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
from attention_cases import COMPOSITIONS, Heads, Step, make_step, nan_pool, spec_of
from jax.sharding import PartitionSpec
from tpu_interpreter import INTERPRET, SMALL, fail_on_races

from jaxserve.kernels.api import AttentionMetadata, AttentionSpec, Chip, LatentBackend, choose_latent_backend
from jaxserve.kernels.context import ContextGroup
from jaxserve.kernels.latent import Projections
from jaxserve.kernels.latent_parts import Division
from jaxserve.kernels.pallas.tpu.backend import PallasTpuLatentAttention
from jaxserve.kernels.pallas.tpu.tuning import CHIPS, ExpandedConfig
from jaxserve.kernels.reference_latent import ReferenceLatentAttention
from jaxserve.kernels.spec import ProjectedHead

no_races = pytest.fixture(autouse=True)(fail_on_races)

LATENT_DIM, ROW_DIM = 32, 48
HEAD = ProjectedHead(nope_dim=20, rope_dim=ROW_DIM - LATENT_DIM, value_dim=24)  # expanding pays from 71 queries on
BINDS: dict[str, Callable[[AttentionSpec], LatentBackend]] = {
    "reference": ReferenceLatentAttention,
    "tpu": functools.partial(
        PallasTpuLatentAttention,
        interpret=INTERPRET,
        override=SMALL,
        expanded_override=ExpandedConfig(SMALL.extend, heads_at_once=2, vmem_limit_bytes=SMALL.vmem_limit_bytes or 0),
    ),
}
# Interpreting takes long: `make aot` does it, when something has changed.
EACH = [pytest.param(bind, marks=pytest.mark.matrix if name == "tpu" else (), id=name) for name, bind in BINDS.items()]


@dataclasses.dataclass(frozen=True)
class Latents:
    """A step over latents, and what they are projected to."""

    step: Step
    q: np.ndarray  # [T, H, key_dim]; NaN for padding
    projections: Projections

    @staticmethod
    def draw(rows: Any, num_heads: int, **options: Any) -> Latents:
        step = make_step(rows, Heads(num_heads, 1, ROW_DIM), **options)
        rng = np.random.default_rng(1)
        q = rng.standard_normal((*step.q.shape[:2], HEAD.key_dim)).astype(np.float32)
        q[~step.is_live] = np.nan
        drawn = (rng.standard_normal((num_heads, n, LATENT_DIM)) / LATENT_DIM**0.5 for n in (HEAD.nope_dim, HEAD.value_dim))
        return Latents(step, q, Projections(*(matrices.astype(np.float32) for matrices in drawn)))

    def expected(self) -> np.ndarray:
        """By definition: keys and values are projected, in float64."""
        projected = [x.astype(np.float64) for x in self.projections]
        out = np.zeros((*self.q.shape[:2], HEAD.value_dim))
        for token in np.flatnonzero(self.step.is_live):
            rows = self.step.keys[self.step.token_rows[token]][: self.step.token_positions[token] + 1, 0].astype(np.float64)
            latents, rotated = np.split(rows, [LATENT_DIM], axis=1)
            keys, values = (np.einsum("sl,hnl->hsn", latents, x) for x in projected)
            nope, q_rotated = np.split(self.q[token].astype(np.float64), [HEAD.nope_dim], axis=1)
            scores = (np.einsum("hn,hsn->hs", nope, keys) + q_rotated @ rotated.T) * HEAD.key_dim**-0.5
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[token] = np.einsum("hs,hsv->hv", weights / weights.sum(axis=1, keepdims=True), values)
        return out


def run_latent(backend: LatentBackend, latents: Latents) -> np.ndarray:
    """float32 [T, H, value_dim], of the second of two layers whose pages hold NaN but for what the step may see."""
    step, offset = latents.step, jnp.int32(latents.step.num_pages)
    divided = functools.partial(over_devices, backend)

    @functools.partial(jax.jit, static_argnames="decode_q_len")
    def layer(pool: Any, rows: jax.Array, q: jax.Array, arguments: Any, decode_q_len: int | None) -> Any:
        @divided
        def attend(pool: Any, q: jax.Array, projections: Projections) -> Any:
            metadata = backend.plan(AttentionMetadata(**arguments, decode_q_len=decode_q_len))
            pool = backend.write(rows, pool, metadata, offset)
            return backend.attend(q, projections, pool, metadata, offset, scale=HEAD.key_dim**-0.5), pool

        return attend(pool, q, latents.projections)

    before = step.before(32)
    pool = nan_pool(backend, 2 * step.num_pages)  # type: ignore[arg-type]
    if backend.spec.context is not None:
        pool = jax.tree.map(lambda x: jnp.tile(x, (1, backend.spec.context.axis_size, *[1] * (x.ndim - 2))), pool)
    q = np.zeros((*before.q.shape[:2], HEAD.key_dim), np.float32)
    if before.is_live.any():
        _, pool = layer(pool, before.new(step.keys)[:, 0], q, before.plan_arguments(), None)
    out, _ = layer(pool, step.new(step.keys)[:, 0], latents.q, step.plan_arguments(), step.decode_q_len)
    return np.asarray(out)


def over_devices(backend: LatentBackend, attend: Callable[..., Any]) -> Callable[..., Any]:
    """Each with some of the heads, and with the part of each page that the backend's context gives it."""
    context = backend.spec.context
    if context is None:
        return attend
    mesh = jax.make_mesh((context.axis_size,), (context.axis,), axis_types=(jax.sharding.AxisType.Auto,))
    pool, heads = (PartitionSpec(None, context.axis),) * 2
    in_specs = (pool, heads, PartitionSpec(context.axis))
    return jax.shard_map(attend, mesh=mesh, in_specs=in_specs, out_specs=(heads, pool), check_vma=False)


def spec_for(latents: Latents) -> AttentionSpec:
    return spec_of(latents.step, jnp.float32, latent_dim=LATENT_DIM, projected=HEAD)


@pytest.mark.parametrize("bind", EACH)
def test_the_same_bits_in_any_step(bind: Callable[[AttentionSpec], LatentBackend]) -> None:
    rng = np.random.default_rng(7)
    keys = rng.standard_normal((70, 1, ROW_DIM)).astype(np.float32)
    queries = rng.standard_normal((70, 2, HEAD.key_dim)).astype(np.float32)
    found = []
    for seed, (rows, own) in enumerate(COMPOSITIONS):
        latents = Latents.draw(rows, 2, page_size=8, num_tokens=96, seed=seed)
        is_own = latents.step.token_rows == own
        latents.step.keys[own], latents.q[is_own] = keys, queries[70 - rows[own][0] :]
        backend = bind(dataclasses.replace(spec_for(latents), batch_invariant=True))
        found.append(run_latent(backend, latents)[is_own])
        np.testing.assert_array_equal(found[-1], found[0][-len(found[-1]) :], err_msg=str(rows))


@pytest.mark.parametrize("bind", EACH)
@pytest.mark.parametrize("decode_q_len", [1, None])
def test_absorbed(bind: Callable[[AttentionSpec], LatentBackend], decode_q_len: int | None) -> None:
    rows = ((1, 9), (0, 0), (1, 20)) if decode_q_len else ((1, 17), (0, 0), (9, 20), (2, 2))
    latents = Latents.draw(rows, 4, num_tokens=16, decode_q_len=decode_q_len)
    np.testing.assert_allclose(run_latent(bind(spec_for(latents)), latents), latents.expected(), atol=2e-6, rtol=0)


# Rows, token slots, how they are divided, and into how many parts that are absorbed and expanded.
DIVIDED: dict[str, tuple[Any, int, dict[str, int], tuple[int, int]]] = {
    "one prompt": (((80, 80),), 80, {}, (0, 1)),
    "rows of many queries and of few": (((1, 17), (90, 100), (0, 0), (9, 20), (71, 75)), 200, {"absorbed_tokens": 8}, (2, 1)),
    "a long prefix in many parts": (((75, 300), (2, 2)), 96, {"expanded_bytes": 40 * 4 * 4 * (36 + 24)}, (1, 8)),
    "rows behind the most parts are absorbed": (((72, 80), (72, 150)), 144, {"most_expanded_parts": 1}, (1, 1)),
    "none is expanded": (((70, 90), (1, 5)), 80, {"absorbed_tokens": 64}, (2, 0)),
}


def check_divided(bind: Callable[..., LatentBackend], name: str) -> None:
    rows, num_tokens, division, num_parts = DIVIDED[name]
    latents = Latents.draw(rows, 4, num_tokens=num_tokens, page_size=8)
    backend = bind(spec_for(latents), division=Division(**division))
    divided = backend.plan(AttentionMetadata(**latents.step.plan_arguments(), decode_q_len=None)).work.divided
    assert divided is not None
    assert (int(divided.num_absorbed), int(divided.num_expanded)) == num_parts
    np.testing.assert_allclose(run_latent(backend, latents), latents.expected(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", DIVIDED)
def test_rows_of_many_queries_are_expanded(name: str) -> None:
    check_divided(BINDS["reference"], name)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["rows of many queries and of few"])
def test_rows_of_many_queries_are_expanded_on_tpus(name: str) -> None:
    check_divided(BINDS["tpu"], name)


def test_short_steps_are_not_divided() -> None:
    latents = Latents.draw(((60, 60),), 4)
    backend = ReferenceLatentAttention(spec_for(latents))
    assert backend.plan(AttentionMetadata(**latents.step.plan_arguments(), decode_q_len=None)).work.divided is None


# Steps that devices share by tokens: a page of 8 has 4 or 2 of each. Rows, what is absorbed and what expanded, as above.
SHARED: dict[str, tuple[Any, int | None, int, dict[str, int]]] = {
    "decode": (((1, 9), (0, 0), (1, 20), (1, 1), (1, 2)), 1, 5, {}),
    "drafts": (((3, 9), (0, 0), (2, 20), (3, 3), (1, 15)), 3, 15, {}),
    "a short step": (((1, 17), (0, 0), (9, 20), (2, 2)), None, 16, {}),
    "parts of both kinds": (((1, 17), (90, 100), (0, 0), (9, 20), (71, 75)), None, 200, {"absorbed_tokens": 8}),
    "a row of each kind": (((1, 17), (71, 75)), None, 80, {"absorbed_tokens": 8}),
    "a long prefix in many parts": (((75, 300), (2, 2)), None, 96, {"expanded_bytes": 40 * 4 * (36 + 24)}),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("num_devices", [2, 4])
def test_devices_share_latents_by_tokens(num_devices: int, name: str) -> None:
    check_shared(BINDS["reference"], name, num_devices)


@pytest.mark.matrix
def test_tpus_share_latents_by_tokens() -> None:
    check_shared(BINDS["tpu"], "a row of each kind", 2, heads_each=2)


def check_shared(bind: Callable[..., LatentBackend], name: str, num_devices: int, heads_each: int = 1) -> None:
    """`num_devices` of 4 share, so 2 of them are two groups."""
    rows, decode_q_len, num_tokens, division = SHARED[name]
    latents = Latents.draw(rows, 4 * heads_each, num_tokens=num_tokens, page_size=8, decode_q_len=decode_q_len)
    context = ContextGroup("tensor", 4, num_devices)
    spec = dataclasses.replace(spec_for(latents), num_heads=heads_each, page_size=8 // num_devices, context=context)
    backend = bind(spec, division=Division(**division))
    np.testing.assert_allclose(run_latent(backend, latents), latents.expected(), atol=2e-6, rtol=0)


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
