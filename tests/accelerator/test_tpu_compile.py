"""The TPU kernels through libtpu's compiler for chips that are not there: they compile, take the VMEM that the cost model says,
and neither they nor XLA around them copy the KV pool."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing here touches a TPU

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.bench.inputs import AttentionCase, make_inputs
from jaxserve.bench.shapes import Shape
from jaxserve.bench.tpu import TpuKernels
from jaxserve.kernels.api import AttentionMetadata
from jaxserve.kernels.pallas.tpu.attention import extend_attention, paged_attention
from jaxserve.kernels.pallas.tpu.backend import PallasTpuAttention
from jaxserve.kernels.pallas.tpu.layout import RowLayout
from jaxserve.kernels.pallas.tpu.merge import tokens_are_whole_tiles
from jaxserve.kernels.pallas.tpu.mla import mla_config, write_latents
from jaxserve.kernels.pallas.tpu.plan import plan_pass, plan_step
from jaxserve.kernels.pallas.tpu.tuning import CHIPS, PassShape, TpuConfig, expanded_config, pass_shapes, vmem_bytes
from jaxserve.kernels.spec import AttentionSpec, Chip
from tests.accelerator.conftest import some_always
from tests.accelerator.proofs import Facts

pytest.importorskip("libtpu", reason="pip install 'jax[tpu]' brings libtpu, which compiles for TPUs")

pytestmark = pytest.mark.compile  # what the newest JAX is tested with too

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
NUM_PAGES = 512
Prove = Callable[..., Facts]


@functools.cache
def one_chip(name: str) -> Mesh:
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[name])
    return Mesh(np.array(topology.devices[:1]), ("tensor",))


@dataclasses.dataclass(frozen=True)
class Case:
    chip: str
    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 128
    kv_dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    is_causal: bool = True
    rows: int = 64
    tokens: int = 256
    max_pages: int = 64

    @property
    def spec(self) -> AttentionSpec:
        chip = Chip.of(one_chip(self.chip).devices.flat[0])
        heads = (self.query_heads, self.kv_heads, self.head_dim)
        return AttentionSpec(chip, *heads, "bfloat16", self.kv_dtype, self.page_size, is_causal=self.is_causal)


def inputs_of(case: Case, num_tokens: int) -> tuple[Any, dict[str, Any], Any]:
    """Shapes of the KV cache and of a plan's arguments, and what makes more of them."""
    replicated = NamedSharding(one_chip(case.chip), PartitionSpec())
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=replicated)
    cache = jax.tree.map(lambda page: shape((NUM_PAGES, *page.shape), page.dtype), PallasTpuAttention(case.spec).kv_pages())
    sizes = {
        "kv_lens": (case.rows,),
        "cu_q_lens": (case.rows + 1,),
        "page_table": (case.rows, case.max_pages),
        "slot_pages": (num_tokens,),
        "slot_offsets": (num_tokens,),
    }
    arguments = {name: shape(size, jnp.int32) for name, size in sizes.items()}
    return cache, arguments, shape


def lower_layer(case: Case, decode_q_len: int | None) -> tuple[Any, Any]:
    """One layer of a step: the plan, the write and the attention. Lowered, and the shapes of its KV cache."""
    backend = PallasTpuAttention(case.spec)
    T = case.rows * decode_q_len if decode_q_len else case.tokens

    def layer(cache: Any, qkv: jax.Array, arguments: Any, page_offset: jax.Array, sinks: jax.Array) -> Any:
        metadata = backend.plan(AttentionMetadata(**arguments, decode_q_len=decode_q_len))
        q, cache = backend.rope_and_write(qkv, None, cache, metadata, page_offset)
        out = backend.ragged_paged_attention(
            q,
            cache,
            metadata,
            page_offset,
            scale=case.head_dim**-0.5,
            sliding_window=case.window,
            soft_cap=case.soft_cap,
            sinks=sinks if case.sinks else None,
        )
        return out, cache

    cache, arguments, shape = inputs_of(case, T)
    qkv = shape((T, case.kv_heads, case.spec.group + 2, case.head_dim), jnp.bfloat16)
    others = (shape((), jnp.int32), shape((case.query_heads,), jnp.float32))
    with jax.sharding.use_abstract_mesh(one_chip(case.chip).abstract_mesh):
        lowered = jax.jit(layer, donate_argnums=0).trace(cache, qkv, arguments, *others).lower()
    return lowered, cache


def check_in_place(facts: Facts, cache: Any) -> None:
    pool = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert facts.aliased_bytes >= pool, "the KV cache is not updated in place"
    for array in jax.tree.leaves(cache):
        assert not facts.copies_of(array.shape)


def check_compiled(
    facts: Facts,
    cache: Any,
    device_kind: str,
    shapes: tuple[PassShape, PassShape],
    config: TpuConfig,
    decode_q_len: int | None = None,
) -> None:
    """`shapes` and the config's parts are those of the decode and the extend pass."""
    check_in_place(facts, cache)
    decode = config.decode_of(decode_q_len or config.decode_queries)
    passes = dict(zip(("paged_decode", "paged_extend"), zip(shapes, (decode, config.extend), strict=True), strict=True))
    for kernel in facts.tpu_kernels:
        print(kernel)
        assert kernel.told_bytes > 0, f"XLA knows no cost of {kernel.name}"
        assert kernel.vmem_bytes <= kernel.vmem_limit_bytes <= CHIPS[device_kind].vmem_bytes, kernel
        if kernel.name in passes:
            assert kernel.vmem_bytes <= 1.1 * vmem_bytes(*passes[kernel.name]) + (1 << 20), (kernel, passes[kernel.name])


def kernel_names(backend: PallasTpuAttention, decode_only: bool) -> set[str]:
    """Of a step's layer."""
    merges = tokens_are_whole_tiles(backend.spec.group, backend.layout.value_lanes, "bfloat16")
    of_mixed_steps = {"paged_extend"} | ({"paged_merge"} if merges else set())
    return {"paged_decode", "write_kv"} | (set() if decode_only else of_mixed_steps)


def check(prove: Prove, case: Case, decode_q_len: int | None) -> None:
    lowered, cache = lower_layer(case, decode_q_len)
    facts = prove(lowered)
    backend = PallasTpuAttention(case.spec)
    check_compiled(facts, cache, case.spec.chip.kind, pass_shapes(case.spec), backend.config, decode_q_len)
    assert sorted(kernel.name for kernel in facts.tpu_kernels) == sorted(kernel_names(backend, decode_q_len is not None))


@pytest.mark.parametrize("decode_q_len", [1, 8, None], ids=["decode", "verify", "mixed"])
@pytest.mark.parametrize("chip", some_always(TOPOLOGIES, "v6e"))
def test_llama_8b(chip: str, decode_q_len: int | None, prove: Prove) -> None:
    check(prove, Case(chip, 32, 8, 128), decode_q_len)


def test_what_xla_is_told_of_costs(prove: Prove) -> None:
    """64 rows that see 2048 keys of 512 bytes per KV head, or as many as the page table or the window has."""
    for more, keys in (({}, 2048), ({"max_pages": 4}, 512), ({"window": 100}, 100)):
        lowered, _ = lower_layer(Case("v6e", 8, 2, 128, **more), decode_q_len=1)
        told = {kernel.name: kernel.told_bytes for kernel in prove(lowered).tpu_kernels}
        queries_and_results = 64 * 8 * 256 * 2
        assert told["paged_decode"] == 64 * keys * 2 * 512 + queries_and_results
        assert told["write_kv"] == 64 * 2 * 512 * (1 + 2 * 16)  # a new row; a group of 16 tokens, read and written


@pytest.mark.parametrize(
    "case",
    [
        Case("v5e", 32, 8, 128, kv_dtype="int8"),
        Case("v6e", 8, 1, 128, kv_dtype="float8_e4m3fn"),
        Case("7x", 32, 8, 128, kv_dtype="float8_e4m3fn", page_size=256),
    ],
    ids=str,
)
def test_quantized(case: Case, prove: Prove) -> None:
    for decode_q_len in (1, 5, None):
        check(prove, case, decode_q_len)


@pytest.mark.parametrize(
    "case",
    [
        Case("v5e", 32, 8, 128, page_size=16),
        Case("v6e", 64, 8, 64, window=128, sinks=True),
        Case("7x", 16, 16, 80, page_size=32),
        Case("v5e", 12, 4, 96, page_size=64),
        Case("v6e", 8, 4, 256, window=1024, soft_cap=50.0, page_size=256),
        Case("7x", 16, 1, 192),
        Case("v6e", 32, 32, 128, page_size=256, tokens=4096, rows=4),
        Case("7x", 32, 8, 128, tokens=8192, rows=8, max_pages=1024),
        Case("v5e", 12, 12, 64, is_causal=False, tokens=4096, max_pages=4),
        Case("v6e", 12, 12, 64, is_causal=False, window=65, tokens=4096),
        Case("7x", 16, 16, 64, is_causal=False, window=65, tokens=4096),
    ],
    ids=str,
)
def test_shapes_and_options(case: Case, prove: Prove) -> None:
    check(prove, case, decode_q_len=None)  # both kernels


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_what_tuning_would_try(op: str, prove: Prove) -> None:
    """The entries with the least and the most VMEM, as `jaxserve bench kernels --tune` calls the kernels for a small shape.

    All of them take minutes; they differ in a factor of two in one or two sizes.
    """
    shape = Shape(4, 2, 128, page_size=128)
    replicated = NamedSharding(one_chip("v6e"), PartitionSpec())
    here = TpuKernels(Chip.of(one_chip("v6e").devices.flat[0]))
    rows = ((1, 300),) * 16 if op == "decode" else ((250, 600), (6, 6))
    case = AttentionCase(rows, 4, 2, page_size=128)
    default = here.default_config(op, shape)
    inputs = make_inputs(case, calls=1, row_dim=256)
    pass_shape = pass_shapes(shape.spec(here.chip))[op == "extend"]
    tried = sorted(here.others(op, shape, default), key=lambda config: vmem_bytes(pass_shape, config))
    for config in (tried[0], tried[-1]):
        runnable = here.runnable(op, case, inputs, config)
        arguments = (jnp.int32(0), runnable.carry, runnable.operands)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), arguments)
        with jax.sharding.use_abstract_mesh(replicated.mesh.abstract_mesh):
            lowered = jax.jit(runnable.call).trace(*shapes).lower()
        for kernel in prove(lowered).tpu_kernels:
            assert kernel.vmem_bytes <= kernel.vmem_limit_bytes, (config, kernel)


def test_a_page_table_larger_than_scalar_memory(prove: Prove) -> None:
    """256 rows of 131072 tokens: 1 MiB."""
    check(prove, Case("v6e", 8, 2, 128, rows=256, max_pages=1024), decode_q_len=1)


@pytest.mark.parametrize("decode_q_len", [1, None], ids=["decode", "mixed"])
def test_layers_in_a_loop_carry_the_pool_in_place(decode_q_len: int | None, prove: Prove) -> None:
    case, layers = Case("v6e", 8, 2, 128), 4
    backend = PallasTpuAttention(case.spec)
    T, E, D = case.rows if decode_q_len else case.tokens, case.query_heads * case.head_dim, case.head_dim

    def step(cache: Any, x: jax.Array, weights: jax.Array, arguments: Any) -> Any:
        metadata = backend.plan(AttentionMetadata(**arguments, decode_q_len=decode_q_len))

        def layer(carry: Any, inputs: Any) -> Any:
            (x, cache), (weight, index) = carry, inputs
            page_offset = index * (NUM_PAGES // layers)
            qkv = (x @ weight).reshape(T, case.kv_heads, -1, D)
            q, cache = backend.rope_and_write(qkv, None, cache, metadata, page_offset)
            out = backend.ragged_paged_attention(q, cache, metadata, page_offset, scale=0.1)
            return (x + out.reshape(T, E), cache), None

        return jax.lax.scan(layer, (x, cache), (weights, jnp.arange(layers)))[0]

    cache, arguments, shape = inputs_of(case, T)
    weights = shape((layers, E, (case.query_heads + 2 * case.kv_heads) * D), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(one_chip(case.chip).abstract_mesh):
        lowered = jax.jit(step, donate_argnums=0).trace(cache, shape((T, E), jnp.bfloat16), weights, arguments).lower()
    check_in_place(prove(lowered), cache)


@pytest.mark.parametrize(
    ("chip", "num_heads", "kv_dtype"),
    [("v5e", 16, "bfloat16"), ("v6e", 128, "bfloat16"), ("7x", 128, "float8_e4m3fn"), ("v6e", 16, "int8")],
)
def test_mla(chip: str, num_heads: int, kv_dtype: str, prove: Prove) -> None:
    """The rows of DeepSeek: 512 + 64."""
    layout, page_size = RowLayout.latent(512, 64), 128
    kind = one_chip(chip).devices.flat[0].device_kind
    config = mla_config(num_heads, layout, page_size, "bfloat16", kv_dtype, kind)

    def layer(cache: Any, new: Any, q: Any, kv_lens: Any, cu_q_lens: Any, table: Any, slots: Any) -> Any:
        plan = plan_step(kv_lens, cu_q_lens, table, *slots, decode_q_len=None, page_size=page_size, config=config)
        cache = write_latents(*cache, *new, plan.write, 0)
        options: dict[str, Any] = {"layout": layout, "scale": 0.07, "vmem_limit_bytes": config.vmem_limit_bytes}
        return paged_attention(q, *cache, plan, 0, **options), cache

    replicated = NamedSharding(one_chip(chip), PartitionSpec())
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=replicated)
    pool = shape((NUM_PAGES, *layout.page_shape(1, page_size)), jnp.dtype(kv_dtype))
    cache = (pool, None if kv_dtype == "bfloat16" else shape((NUM_PAGES, 2, page_size), jnp.float32))
    new, q = [shape((256, d), jnp.bfloat16) for d in (512, 64)], shape((256, num_heads, 512 + 64), jnp.bfloat16)
    rows = [shape(s, jnp.int32) for s in ((64,), (65,), (64, 32))]
    slots = [shape((256,), jnp.int32)] * 2
    with jax.sharding.use_abstract_mesh(replicated.mesh.abstract_mesh):
        lowered = jax.jit(layer, donate_argnums=0).trace(cache, new, q, *rows, slots).lower()
    decode, extend = (
        PassShape(layout, num_heads, 1, page_size, "bfloat16", kv_dtype, is_decode) for is_decode in (True, False)
    )
    check_compiled(prove(lowered), cache, kind, (decode, extend), config)


@pytest.mark.parametrize(("chip", "num_heads"), [("v6e", 16), ("v5e", 16), ("7x", 128)])
def test_expanded_latents(chip: str, num_heads: int, prove: Prove) -> None:
    """Heads of DeepSeek, 192 and 128, over a part of each row's keys."""
    layout, page_size, num_rows, num_tokens = RowLayout.of(192, 128), 128, 8, 1024
    kind = one_chip(chip).devices.flat[0].device_kind
    config = expanded_config(num_heads, layout, page_size, "bfloat16", kind)
    heads = config.heads_at_once

    def part(q: Any, pool: Any, table: Any, q_start: Any, q_len: Any, kv_len: Any, positions: Any) -> Any:
        plan = plan_pass(q_start, q_len, kv_len, num_tokens, config.extend, positions)
        return extend_attention(q, pool, plan, table, 0, layout=layout, scale=0.07, vmem_limit_bytes=config.vmem_limit_bytes)

    replicated = NamedSharding(one_chip(chip), PartitionSpec())
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=replicated)
    q = shape((num_tokens, num_heads, 192), jnp.bfloat16)
    pool = shape((num_heads // heads, 64, *layout.page_shape(heads, page_size)), jnp.bfloat16)
    rows = [shape((num_rows,), jnp.int32)] * 4
    with jax.sharding.use_abstract_mesh(replicated.mesh.abstract_mesh):
        lowered = jax.jit(part).trace(q, pool, shape((num_rows, 1, 8), jnp.int32), *rows).lower()
    facts = prove(lowered)
    (kernel,) = facts.tpu_kernels
    needed = vmem_bytes(PassShape(layout, heads, heads, page_size, "bfloat16", "bfloat16", is_decode=False), config.extend)
    assert kernel.name == "paged_extend" and kernel.told_bytes > 0
    assert kernel.vmem_bytes <= min(kernel.vmem_limit_bytes, 1.1 * needed + (1 << 20)), (kernel, needed)
    assert not facts.copies_of((pool.shape[0] * pool.shape[1], *pool.shape[2:])) and not facts.copies_of(pool.shape)


def test_the_chips_own_checks_are_off_unless_asked_for() -> None:
    """Read from what is lowered: each kernel's call says so."""
    case = Case("v6e", 8, 2, 128)
    cache, arguments, shape = inputs_of(case, case.rows)
    qkv = shape((case.rows, 2, 6, 128), jnp.bfloat16)
    for checked in (False, True):
        backend = PallasTpuAttention(case.spec, checked=checked)

        def layer(cache: Any, qkv: jax.Array, arguments: Any, backend: PallasTpuAttention = backend) -> Any:
            metadata = backend.plan(AttentionMetadata(**arguments, decode_q_len=1))
            q, cache = backend.rope_and_write(qkv, None, cache, metadata, 0)
            return backend.ragged_paged_attention(q, cache, metadata, 0, scale=0.1), cache

        with jax.sharding.use_abstract_mesh(one_chip(case.chip).abstract_mesh):
            text = jax.jit(layer).trace(cache, qkv, arguments).lower().as_text()
        for check in ("bounds", "semaphore"):
            assert text.count(f"disable_{check}_checks") == (0 if checked else 2), (check, checked)
