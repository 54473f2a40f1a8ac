"""What else a JAX program could run for the same shapes: cuDNN on dense KV, and JAX's own paged kernel, deprecated, in Triton.

Dense KV is no replacement for pages, but it is what cuDNN reads; contexts are of one length here, so that it reads no more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.device.case import Case, Measure, NotHereError, Numbers, Setting
from benchmarks.device.decode import decode_shapes
from benchmarks.device.extend import extend_shapes
from jaxserve.bench.inputs import AttentionCase, make_inputs, random_array
from jaxserve.bench.timing import Plan, Timing, compile_calls, copies_needed

# The Triton kernel's indices are int32: a larger pool would be read at wrong places.
_MOST_INDEXED = 1 << 31
_TRITON_SPLITS, _TRITON_BLOCK_TOKENS = 16, 128


def is_plain(case: AttentionCase) -> bool:
    """Bfloat16 rows of one length without features that only some implementations have."""
    is_uniform = len(set(case.rows)) == 1
    has_features = case.sliding_window is not None or case.soft_cap is not None or case.uses_sinks
    return is_uniform and not has_features and not case.is_quantized and case.head_dim == case.head_dim_v


def _result(name: str, timing: Timing, calls_each: int, case: AttentionCase) -> dict[str, Any]:
    times = {
        key: value / calls_each if key.startswith("us") else value for key, value in timing.as_dict().items() if key != "calls"
    }
    return {"against": name, **times, "calls": timing.calls * calls_each, "bytes": case.nbytes, "flop": case.flop}


def cudnn_dense(name: str, case: AttentionCase, setting: Setting) -> Measure:
    """Queries are the result of the call before: nothing can be moved out of the loop. An even number of calls in a round ends
    where it began, so that the loop needs no copy."""
    setting.needs_cuda()
    q_len, kv_len = case.rows[0]
    R = case.num_rows
    copies = copies_needed(case.kv_bytes)
    rounds = copies if copies % 2 == 0 else copies + 1
    shape = (R, kv_len, case.num_kv_heads, case.head_dim)
    keys, values = ([random_array(shape, case.dtype, seed)[:R] for seed in range(first, first + copies)] for first in (0, 50))
    q = random_array((R, q_len, case.num_heads, case.head_dim), case.dtype, 100)[:R]

    def call(index: jax.Array, q: jax.Array, operands: Any) -> jax.Array:
        keys, values = operands
        for copy in range(rounds):
            q = jax.nn.dot_product_attention(
                q,
                keys[copy % copies],
                values[copy % copies],
                scale=case.scale,
                is_causal=q_len > 1,
                implementation="cudnn",
            )
        return q

    plan = Plan()
    calls = plan.calls(case.expected_us * rounds)
    compiled = compile_calls(call, q, (keys, values), calls, plan)
    return lambda: _result(name, compiled.time()[0], rounds, case)


def triton_paged(name: str, case: AttentionCase, setting: Setting) -> Measure:
    setting.needs_cuda()
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    plan = Plan()
    calls = plan.calls(case.expected_us)
    copies = min(copies_needed(case.kv_bytes), calls)
    num_pages = copies * case.num_pages
    if case.num_kv_heads * num_pages * case.page_size * case.head_dim >= _MOST_INDEXED:
        raise NotHereError("its int32 indices do not reach over so large a pool")
    # The same queries, page table and rotation as ours; the pool has another layout.
    inputs = make_inputs(case, calls)
    q, table, lengths, rotation = inputs.q, inputs.page_table, inputs.kv_lens, inputs.rotation
    del inputs
    pages_shape = (case.num_kv_heads, num_pages, case.page_size, case.head_dim)
    keys, values = (random_array(pages_shape, case.kv_dtype, seed)[: case.num_kv_heads] for seed in (0, 1))
    splits = min(_TRITON_SPLITS, table.shape[1])
    while table.shape[1] % splits:
        splits -= 1

    def call(index: jax.Array, out: jax.Array, operands: Any) -> jax.Array:
        q, keys, values, table, lengths, rotation = operands
        return paged_attention(
            q * case.scale,
            keys,
            values,
            table + rotation.offset(index),
            lengths,
            pages_per_compute_block=max(1, _TRITON_BLOCK_TOKENS // case.page_size),
            k_splits=splits,
        )

    compiled = compile_calls(call, jnp.zeros_like(q), (q, keys, values, table, lengths, rotation), calls, plan)

    def measure() -> Numbers:
        timing, out = compiled.time()
        if not bool(jnp.isfinite(out).all()):
            raise FloatingPointError("the result is not finite")
        return _result(name, timing, 1, case)

    return measure


def cases(setting: Setting) -> list[Case]:
    found: list[Case] = []

    def add(what: str, name: str, run: Callable[..., Measure], case: AttentionCase) -> None:
        found.append(Case(f"{name}: {what}", functools.partial(run, name, case, setting)))

    decode = {name: case for name, case in decode_shapes(setting).items() if is_plain(case) and case.rows[0][0] == 1}
    extend = {name: case for name, case in extend_shapes(setting).items() if is_plain(case)}
    for name, case in extend.items():
        # cuDNN's causal mask begins at the first key: right only where the prompt is all there is.
        if case.rows[0][0] == case.rows[0][1]:
            add("cuDNN dense", name, cudnn_dense, case)
    for name, case in decode.items():
        if case.page_size == 64 or setting.smoke:
            add("cuDNN dense", name, cudnn_dense, case)
        add("JAX Triton paged", name, triton_paged, case)
    return found
