"""The KV write with rotation: bound by the bytes of queries, keys and values. Its input is fresh from the projection, so in the
L2 where it fits; the pages it writes to are not."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.case import Case, Measure, Setting
from benchmarks.device.kernels import SMOKE_PLAN
from jaxserve.bench.timing import Plan, Rotation, compile_calls, copies_needed
from jaxserve.kernels.rotary import Rotary

NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE = 8, 4, 128, 64


def time_write(num_tokens: int, kv_dtype: str, setting: Setting) -> Measure:
    from jaxserve.kernels.pallas.gpu import write as gpu_write

    Hkv, page_size = (2, 16) if setting.smoke else (NUM_KV_HEADS, PAGE_SIZE)
    is_quantized = kv_dtype != "bfloat16"
    kv_bytes = num_tokens * Hkv * 2 * HEAD_DIM * jnp.dtype(kv_dtype).itemsize
    qkv_bytes = num_tokens * Hkv * (GROUP + 2) * HEAD_DIM * 2
    nbytes = qkv_bytes + num_tokens * Hkv * GROUP * HEAD_DIM * 2 + kv_bytes + num_tokens * HEAD_DIM * 4
    plan = SMOKE_PLAN if setting.smoke else Plan()
    calls = plan.calls(6 + nbytes / 3e6)
    num_pages = -(-num_tokens // page_size)
    copies = min(copies_needed(kv_bytes), calls)

    rng = np.random.default_rng(0)
    slots = rng.permutation(num_pages * page_size)[:num_tokens]
    slot_pages, slot_offsets = (jnp.asarray(x, jnp.int32) for x in np.divmod(slots, page_size))
    qkv = jax.random.normal(jax.random.key(0), (num_tokens, Hkv, GROUP + 2, HEAD_DIM), jnp.bfloat16)
    angles = jax.random.uniform(jax.random.key(1), (num_tokens, HEAD_DIM // 2), maxval=6.28)
    rotation = Rotation.of(copies, num_pages)
    pool = jnp.zeros((copies * num_pages, Hkv, page_size, 2 * HEAD_DIM), jnp.dtype(kv_dtype))
    scales = jnp.zeros((copies * num_pages, Hkv, 2, page_size), jnp.float32) if is_quantized else None
    operands = (qkv, Rotary(jnp.cos(angles), jnp.sin(angles)), rotation)

    def call(index: jax.Array, carry: Any, operands: Any) -> Any:
        _, pool, scales = carry
        qkv, rotary, rotation = operands
        return gpu_write.rope_and_write(
            qkv, rotary, pool, scales, slot_pages, slot_offsets, rotation.offset(index), interpret=setting.interpret
        )

    q = jnp.zeros((num_tokens, Hkv * GROUP, HEAD_DIM), jnp.bfloat16)
    compiled = compile_calls(call, (q, pool, scales), operands, calls, plan)
    return lambda: {**compiled.time()[0].as_dict(), "bytes": nbytes}


def cases(setting: Setting) -> list[Case]:
    sizes = (5,) if setting.smoke else (64, 256, 8192)
    kinds = ("bfloat16",) if setting.smoke else ("bfloat16", "float8_e4m3fn")
    return [
        Case(f"write {tokens} tokens, {kind}", functools.partial(time_write, tokens, kind, setting))
        for kind in kinds
        for tokens in sizes
    ]
