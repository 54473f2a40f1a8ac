"""Pages of the reference backend: writing drops padding, keeps everything else, and never copies the pool."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Heads, make_step, nan_pool, pack_qkv, spec_of, write

from jaxserve.executor.kv_cache import ArraysLayout
from jaxserve.kernels import reference_pages
from jaxserve.kernels.api import AttentionMetadata, AttentionSpec, Chip
from jaxserve.kernels.metadata import NO_PAGE, drop_padding
from jaxserve.kernels.reference import ReferenceAttention

LAYERS = 3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("decode_q_len", [1, None])
def test_write_touches_the_new_slots_only(decode_q_len: int | None, dtype: Any) -> None:
    rows = [(0, 0), (1, 9), (1, 4), (0, 0)] if decode_q_len else [(3, 9), (0, 0), (1, 4), (8, 8)]
    step = make_step(rows, Heads(4, 2, 8), num_tokens=16, decode_q_len=decode_q_len)
    backend = ReferenceAttention(spec_of(step, dtype))
    pool = nan_pool(backend, LAYERS * step.num_pages)
    arguments = step.plan_arguments()
    metadata = backend.plan(AttentionMetadata(**arguments, decode_q_len=decode_q_len))
    k, v = (jnp.asarray(step.new(x), dtype) for x in (step.keys, step.values))
    layer = 1
    written = write(backend, pool, k, v, metadata, layer * step.num_pages)

    want = np.array(pool.values)
    pages, offsets = (np.asarray(arguments[name]) for name in ("slot_pages", "slot_offsets"))
    for token in np.flatnonzero(step.is_live):
        for which, new in ((reference_pages.KEYS, k), (reference_pages.VALUES, v)):
            bits = np.asarray(new[token]).view(want.dtype)
            want[layer * step.num_pages + pages[token], :, which, offsets[token]] = bits
    np.testing.assert_array_equal(np.asarray(written.values), want)


def test_read_inverts_write() -> None:
    step = make_step([(10, 10)], Heads(2, 2, 8), page_size=4)
    backend = ReferenceAttention(spec_of(step, jnp.bfloat16))
    pool = nan_pool(backend, step.num_pages)
    k, v = (jnp.asarray(step.new(x), jnp.bfloat16) for x in (step.keys, step.values))
    pool = write(backend, pool, k, v, backend.plan(AttentionMetadata(**step.plan_arguments(), decode_q_len=None)), 0)
    for which, new in ((reference_pages.KEYS, k), (reference_pages.VALUES, v)):
        found = reference_pages.read(pool, jnp.asarray(step.page_table), which)
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found[0, :, :10], np.swapaxes(np.asarray(new, np.float32), 0, 1))


def test_padding_goes_nowhere_whatever_its_slot_says() -> None:
    slot_pages = jnp.array([3, 0, NO_PAGE, 2**31 - 1], jnp.int32)
    pages = np.asarray(drop_padding(slot_pages, jnp.array([True, False, True, True])))
    assert pages[0] == 3
    assert np.all(pages[1:] >= NO_PAGE)
    assert len(set(pages.tolist())) == 4
    assert np.all(pages + 1000 > 0)  # adding a layer's offset does not overflow


def compiled_step(decode_q_len: int | None, dtype: Any, num_pages: int) -> tuple[jax.stages.Compiled, tuple[int, ...], int]:
    """A scan over layers with the pool in its carry, donated: how a model uses a backend. And the pool's shape and bytes."""
    Hq, Hkv, D, page_size, R = 4, 2, 16, 8, 4
    T = R if decode_q_len else 16
    name = jnp.dtype(dtype).name
    backend = ReferenceAttention(AttentionSpec(Chip("cpu"), Hq, Hkv, D, name, name, page_size))
    pool = ArraysLayout(backend.kv_pages(), LAYERS * num_pages, tp_size=1).shapes()

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    arguments = {
        "kv_lens": ints(R),
        "cu_q_lens": ints(R + 1),
        "page_table": ints(R, 8),
        "slot_pages": ints(T),
        "slot_offsets": ints(T),
    }

    def model(pool: Any, q: jax.Array, k: jax.Array, v: jax.Array, arguments: dict[str, jax.Array]) -> Any:
        metadata = backend.plan(AttentionMetadata(**arguments, decode_q_len=decode_q_len))

        def layer(carry: tuple[jax.Array, jax.Array], index: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            pool, x = carry
            q, pool = backend.rope_and_write(pack_qkv(x, k, v), None, pool, metadata, index * num_pages)
            window = jnp.where(index % 2 == 0, 5, 1 << 30)
            out = backend.ragged_paged_attention(q, pool, metadata, index * num_pages, scale=0.25, sliding_window=window)
            return (pool, x + out), None

        return jax.lax.scan(layer, (pool, q), jnp.arange(LAYERS, dtype=jnp.int32))[0]

    q, k, v = (jax.ShapeDtypeStruct((T, heads, D), dtype) for heads in (Hq, Hkv, Hkv))
    compiled = jax.jit(model, donate_argnums=0).lower(pool, q, k, v, arguments).compile()
    return compiled, pool.values.shape, int(np.prod(pool.values.shape)) * pool.values.dtype.itemsize


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("decode_q_len", [1, None])
def test_the_pool_is_updated_in_place(decode_q_len: int | None, dtype: Any) -> None:
    compiled, shape, pool_bytes = compiled_step(decode_q_len, dtype, num_pages=4096)
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // 10, f"{memory.temp_size_in_bytes} temporary bytes, pool {pool_bytes}"
    dims = ",".join(map(str, shape))
    copies = re.findall(rf"= \w+\[{dims}\]\S* (?:copy|convert|bitcast-convert)\(.*", compiled.as_text() or "")
    assert not copies, copies
    small: Any = compiled_step(decode_q_len, dtype, num_pages=64)[0].memory_analysis()
    assert memory.temp_size_in_bytes == small.temp_size_in_bytes
