"""The KV write on Hopper: interpreted against the jnp reference with every other byte of the pool watched, and compiled."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.aot.targets import gpu_devices
from jaxserve.kernels.metadata import NO_PAGE
from jaxserve.kernels.pallas.gpu import write as gpu_write
from jaxserve.kernels.rotary import Rotary, quantize_rows, split_and_rotate
from tests.accelerator.conftest import some_always
from tests.accelerator.proofs import Facts

HEAD_DIMS = [64, 80, 96, 128, 192, 256]


@dataclasses.dataclass(frozen=True)
class Case:
    num_tokens: int = 8
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    page_size: int = 8
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    rotates: bool = True
    norms: bool = False
    num_layers: int = 3

    @property
    def is_quantized(self) -> bool:
        return self.kv_dtype != self.dtype

    @property
    def pages_per_layer(self) -> int:
        return -(-self.num_tokens // self.page_size) + 1

    def inputs(self, rng: np.random.Generator) -> tuple[jax.Array, Rotary | None]:
        T, D, dtype = self.num_tokens, self.head_dim, jnp.dtype(self.dtype)
        qkv = jnp.asarray(rng.standard_normal((T, self.num_kv_heads, self.group + 2, D)), dtype)
        angles = rng.uniform(0, 6.28, (T, D // 2))
        cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
        norms = [jnp.asarray(rng.uniform(0.5, 1.5, D), dtype) if self.norms else None for _ in range(2)]
        return qkv, Rotary(cos, sin, *norms, eps=1e-5) if self.rotates else None

    def pool_shape(self) -> tuple[int, ...]:
        return (self.num_layers * self.pages_per_layer, self.num_kv_heads, self.page_size, 2 * self.head_dim)


def bits(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def nan_pool(case: Case) -> tuple[jax.Array, jax.Array | None]:
    """What may not be read, and may not change where nobody writes. int8 has no NaN."""
    shape, dtype = case.pool_shape(), jnp.dtype(case.kv_dtype)
    pool = jnp.full(shape, 77 if case.kv_dtype == "int8" else jnp.nan, dtype)
    scales = jnp.full((*shape[:2], 2, shape[2]), jnp.nan, jnp.float32) if case.is_quantized else None
    return pool, scales


def check(case: Case, interpret: Any, *, padding: tuple[int, ...] = (), layer: int = 2) -> None:
    """One call; all outputs against the reference, and the pool's other bytes against what they were."""
    rng = np.random.default_rng()
    qkv, rotary = case.inputs(rng)
    slots = rng.permutation(case.pages_per_layer * case.page_size)[: case.num_tokens]
    pages, offsets = np.divmod(slots, case.page_size)
    pages[list(padding)] = NO_PAGE + np.array(padding, int)
    pool, scales = nan_pool(case)
    call = jax.jit(functools.partial(gpu_write.rope_and_write, interpret=interpret))
    page_offset = layer * case.pages_per_layer
    arguments = (jnp.asarray(pages, jnp.int32), jnp.asarray(offsets, jnp.int32), jnp.int32(page_offset))
    q, new_pool, new_scales = call(qkv, rotary, pool, scales, *arguments)
    want_q, k, v = jax.jit(split_and_rotate)(qkv, rotary)
    live = np.setdiff1d(np.arange(case.num_tokens), padding)
    assert_close(q[live], want_q[live], case.dtype)
    where = (page_offset + pages[live], slice(None), offsets[live])
    stored = np.asarray(new_pool)[where]
    if case.is_quantized:
        check_quantized(case, stored, np.asarray(new_scales), where, (k[live], v[live]))
        assert_rest_is_untouched(np.asarray(new_scales).swapaxes(2, 3), np.asarray(scales).swapaxes(2, 3), where)
    else:
        assert_close(stored, jnp.concatenate([k, v], -1)[live], case.dtype)
        assert np.array_equal(bits(stored[..., case.head_dim :]), bits(v[live]))
    assert_rest_is_untouched(np.asarray(new_pool), np.asarray(pool), where)


def assert_close(got: Any, want: Any, dtype: str) -> None:
    """Equal but for a last bit here and there: sums and multiply-adds may be ordered and fused differently."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    step = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(got, want, rtol=2 * step, atol=2 * step * 2**-4)
    assert np.sum(got != want) <= 0.02 * got.size


def check_quantized(case: Case, stored: np.ndarray, scales: np.ndarray, where: Any, kv: tuple[Any, Any]) -> None:
    """Values within one step of the reference's (a key may differ in its last bit before), scales nearly equal."""
    for which, x in enumerate(kv):
        want, want_scale = quantize_rows(x, case.kv_dtype)
        scale = scales[where[0], :, which, where[2]]
        np.testing.assert_allclose(scale, want_scale, rtol=1e-6 if which else 2.0**-7)
        got = stored[..., which * case.head_dim :][..., : case.head_dim].astype(np.float64) * scale[..., None]
        want = np.asarray(want).astype(np.float64) * np.asarray(want_scale)[..., None]
        assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)
        if which:
            assert np.mean(got != want) < 0.01
    assert np.isfinite(stored.astype(np.float32)).all()


def assert_rest_is_untouched(new: np.ndarray, old: np.ndarray, where: Any) -> None:
    new, old = bits(new).copy(), bits(old).copy()
    new[where], old[where] = 0, 0
    assert np.array_equal(new, old)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("norms", [False, True])
def test_head_dims(interpret: Any, head_dim: int, norms: bool) -> None:
    check(Case(head_dim=head_dim, norms=norms), interpret, padding=(3,))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("head_dim", some_always([64, 80, 128], 128))
def test_quantized(interpret: Any, kv_dtype: str, head_dim: int) -> None:
    check(Case(head_dim=head_dim, kv_dtype=kv_dtype, norms=head_dim == 128), interpret, padding=(0, 7))


@pytest.mark.parametrize(
    "case",
    [
        Case(num_tokens=1),
        Case(num_tokens=7, group=1),
        Case(num_tokens=12, num_kv_heads=1, group=5, head_dim=80),
        Case(num_tokens=4, num_kv_heads=3, group=8),
        Case(dtype="float16", kv_dtype="float16"),
        Case(rotates=False),
        Case(rotates=False, kv_dtype="int8"),
        Case(num_tokens=6, num_kv_heads=1, head_dim=80, kv_dtype="float8_e4m3fn"),
    ],
    ids=str,
)
def test_shapes(interpret: Any, case: Case) -> None:
    check(case, interpret, padding=(case.num_tokens - 1,) if case.num_tokens > 1 else (), layer=1)


def test_many_tokens_go_in_larger_tiles(interpret: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(gpu_write.DEFAULT, min_blocks=1, max_values=4)
    whole = functools.partial(gpu_write.rope_and_write, config=config)
    monkeypatch.setattr(gpu_write, "rope_and_write", whole)
    check(Case(num_tokens=16, num_kv_heads=4, group=4, norms=True), interpret, padding=(5, 6))


def test_only_padding_writes_nothing(interpret: Any) -> None:
    check(Case(num_tokens=4), interpret, padding=(0, 1, 2, 3))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_rows_of_zeros_and_of_nan(interpret: Any, kv_dtype: str) -> None:
    case = Case(num_tokens=4, kv_dtype=kv_dtype, rotates=False)
    qkv = case.inputs(np.random.default_rng())[0].at[1, :, -1].set(0).at[2, 0, -2, 5].set(jnp.nan)
    pool, scales = nan_pool(case)
    slots = (jnp.zeros(4, jnp.int32), jnp.arange(4, dtype=jnp.int32), 0)
    _, pool, scales = gpu_write.rope_and_write(qkv, None, pool, scales, *slots, interpret=interpret)
    rows = np.asarray(pool[0], np.float32).reshape(2, 8, 2, 64)  # [Hkv, slot, key or value, D]
    if scales is not None:
        assert np.asarray(scales)[0, :, 1, 1].tolist() == [1, 1]
        rows = rows * np.asarray(scales)[0].swapaxes(1, 2)[..., None]
    assert not rows[:, 1, 1].any()
    assert np.isnan(rows[0, 2, 0]).sum() == (1 if scales is None else 64)
    assert np.isfinite(np.delete(rows[:, :4], 2, axis=1)).all()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_rows_that_are_ready(interpret: Any, kv_dtype: str) -> None:
    """The kernel and the scatter give the same bits."""
    case = Case(num_tokens=8, kv_dtype=kv_dtype)
    rng = np.random.default_rng()
    k, v = (jnp.asarray(rng.standard_normal((8, 2, 64)), jnp.bfloat16) for _ in range(2))
    pages = jnp.array([0, 0, 1, NO_PAGE + 3, 0, 1, 1, 0], jnp.int32)
    arguments = (*nan_pool(case), k, v, pages, jnp.arange(8, dtype=jnp.int32), 3)
    got = jax.jit(functools.partial(gpu_write.write_rows, interpret=interpret))(*arguments)
    want = jax.jit(gpu_write.write_rows_xla)(*arguments)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.array_equal(bits(a), bits(b))


def test_tiles_are_aligned_fit_and_fill_the_chip() -> None:
    for D, heads, group, T, kv in itertools.product(
        HEAD_DIMS, [1, 2, 8, 32], [0, 1, 4, 16], [1, 7, 64, 8192], ["bfloat16", "int8"]
    ):
        tile = gpu_write._tile((T, heads, group + 2, D), "bfloat16", kv, 0.0, gpu_write.DEFAULT)
        row_bytes = 2 * D * jnp.dtype(kv).itemsize
        assert T % tile.tokens == 0 and heads % tile.heads == 0
        assert tile.tokens == 1 or tile.heads * row_bytes % 128 == 0, tile
        assert tile.tokens * tile.heads * ((group + 2) * D * 2 + row_bytes) < 227 * 1024, tile
        assert T < 8192 or T // tile.tokens * (heads // tile.heads) >= 264, tile


def test_unsupported_is_said() -> None:
    given = {"head_dim": 128, "group": 4, "dtype": "bfloat16", "pool_dtype": "bfloat16"}
    assert gpu_write.unsupported(**given) is None
    for change, word in [
        ({"dtype": "float32"}, "float32"),
        ({"pool_dtype": "float16"}, "float16"),
        ({"head_dim": 100}, "head_dim"),
        ({"head_dim": 512}, "head_dim"),
        ({"head_dim": 256, "group": 500}, "500 queries"),
    ]:
        assert word in str(gpu_write.unsupported(**{**given, **change}))


# What follows is compiled for an H200 that is not there.


def shapes_of(case: Case) -> tuple[Any, ...]:
    """Arguments of `layers_in_sequence`, as shapes."""
    tokens = jax.ShapeDtypeStruct((case.num_tokens,), jnp.int32)
    made = jax.eval_shape(lambda: (case.inputs(np.random.default_rng(0)), nan_pool(case)))
    (qkv, rotary), (pool, scales) = made
    return qkv, rotary, pool, scales, tokens, tokens, jax.ShapeDtypeStruct((), jnp.int32)


@pytest.mark.compile
@pytest.mark.parametrize("head_dim", some_always(HEAD_DIMS, 128))
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_compiles_without_spills(compile_for_h200: Callable[..., Any], head_dim: int, kv_dtype: str) -> None:
    for num_tokens, num_kv_heads, group, norms in [(8192, 8, 4, True), (64, 1, 8, False)]:
        case = Case(num_tokens, num_kv_heads, group, head_dim, 64, kv_dtype=kv_dtype, norms=norms)
        (report,) = compile_for_h200(gpu_write.rope_and_write, *shapes_of(case)).gpu_kernels
        limit = 168 if head_dim == 80 else 112  # three or four blocks per SM; at 80, lanes hold five columns each
        assert report.spill_bytes == 0 and not report.warnings and report.registers <= limit, report


@pytest.mark.compile
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 8, 1, 128, 64),
        Case(7, 8, 16, 128, 64, norms=True),
        Case(256, 32, 1, 80, 64),
        Case(256, 1, 1, 80, 16, kv_dtype="int8"),
        Case(4096, 4, 7, 128, 64, dtype="float16", kv_dtype="float16"),
        Case(64, 1, 128, 128, 64),
        Case(4096, 2, 16, 256, 64, rotates=False, kv_dtype="float8_e4m3fn"),
    ],
    ids=str,
)
def test_other_shapes_compile(compile_for_h200: Callable[..., Any], case: Case) -> None:
    (report,) = compile_for_h200(gpu_write.rope_and_write, *shapes_of(case)).gpu_kernels
    assert report.spill_bytes == 0 and not report.warnings and report.registers <= 168, report


def read_pool(pool: jax.Array, q: jax.Array) -> jax.Array:
    """Stands in for attention: a kernel that reads the pool, and that the next layer waits for."""

    def body(pool_ref: Any, q_ref: Any, out_ref: Any, buffer: Any, barrier: Any) -> None:
        del q_ref
        plgpu.copy_gmem_to_smem(pool_ref.at[lax.axis_index("token")], buffer, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(buffer, out_ref.at[lax.axis_index("token")])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(q), *pool.shape[1:]), pool.dtype),
        grid=(len(q),),
        grid_names=("token",),
        scratch_types=[plgpu.SMEM(pool.shape[1:], pool.dtype), plgpu.Barrier(num_barriers=1)],
        kernel_name="read_pool",
    )(pool, q)


def layers_in_sequence(
    qkv: jax.Array, rotary: Any, pool: jax.Array, scales: Any, pages: Any, offsets: Any, num_pages: Any, *, write: Any
) -> Any:
    out = []
    for layer in range(3):
        q, pool, scales = write(qkv, rotary, pool, scales, pages, offsets, layer * num_pages)
        seen = read_pool(pool, q)
        qkv = qkv + jnp.mean(seen.astype(jnp.float32), axis=(1, 2, 3)).astype(qkv.dtype)[:, None, None, None]
        out.append(q)
    return out, pool, scales


def write_with_xla(qkv: jax.Array, rotary: Any, pool: jax.Array, scales: Any, *slots: Any) -> Any:
    q, k, v = split_and_rotate(qkv, rotary)
    return q, *gpu_write.write_rows_xla(pool, scales, k, v, *slots)


def pool_sized(facts: Facts, pool: Any) -> list[str]:
    """HLO instructions, those inside fusions too, that copy or convert something as large as the pool."""
    return [str(array) for array in facts.made if array.opcode != "fusion" and array.size >= pool.size]


POOL_CASE = Case(64, 8, 1, 64, 16, num_layers=64)  # pages that fit into read_pool's buffer, and more of them than it reads


@pytest.mark.compile
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("writer", ["kernel", "xla"])
def test_the_pool_is_updated_in_place_layer_by_layer(
    h200: Mesh, prove: Callable[..., Facts], kv_dtype: str, writer: str
) -> None:
    case = dataclasses.replace(POOL_CASE, kv_dtype=kv_dtype)
    shapes = shapes_of(case)
    write = gpu_write.rope_and_write if writer == "kernel" else write_with_xla
    step = functools.partial(layers_in_sequence, write=write)
    replicated = NamedSharding(h200, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), shapes)
    with jax.sharding.use_abstract_mesh(h200.abstract_mesh):
        lowered = jax.jit(step, donate_argnums=(2, 3)).trace(*shapes).lower()
    check_in_place(prove(lowered), shapes[2], shapes[3], num_writes=3 if writer == "kernel" else 0)


@pytest.mark.compile
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_the_pool_is_updated_in_place_on_four_shards(prove: Callable[..., Facts], kv_dtype: str) -> None:
    mesh = Mesh(np.array(gpu_devices("h200", 4)).reshape(1, 4), ("data", "tensor"))
    case = dataclasses.replace(POOL_CASE, kv_dtype=kv_dtype)
    heads, rest = PartitionSpec(None, "tensor"), PartitionSpec()
    qkv, rotary, pool, scales, *slots = shapes_of(case)
    specs = (heads, rest, heads, heads, rest, rest, rest)
    step = jax.shard_map(
        functools.partial(layers_in_sequence, write=gpu_write.rope_and_write),
        mesh=mesh,
        in_specs=specs,
        out_specs=(heads, heads, heads if scales is not None else rest),
        check_vma=False,
    )

    def sharded(x: Any, spec: Any) -> Any:
        return jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=NamedSharding(mesh, spec)), x)

    arguments = [sharded(x, spec) for x, spec in zip((qkv, rotary, pool, scales, *slots), specs, strict=True)]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(step, donate_argnums=(2, 3)).trace(*arguments).lower()
    facts = prove(lowered)
    local = jax.ShapeDtypeStruct((pool.shape[0], pool.shape[1] // 4, *pool.shape[2:]), pool.dtype)
    local_scales = None if scales is None else jax.ShapeDtypeStruct((*local.shape[:2], 2, local.shape[2]), scales.dtype)
    check_in_place(facts, local, local_scales, num_writes=3)


def check_in_place(facts: Facts, pool: Any, scales: Any, *, num_writes: int) -> None:
    assert not pool_sized(facts, pool), pool_sized(facts, pool)
    nbytes = sum(x.size * x.dtype.itemsize for x in (pool, scales) if x is not None)
    assert facts.aliased_bytes >= nbytes
    assert facts.aliasing_kernels == num_writes
