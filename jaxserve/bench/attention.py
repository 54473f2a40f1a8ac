"""One call of each GPU attention kernel for a case. Plans are made beforehand, as in a model: once per step, for all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.inputs import AttentionCase, AttentionInputs
from jaxserve.bench.runnable import Runnable, compile_runnable
from jaxserve.bench.timing import Plan, Rotation, Timing
from jaxserve.kernels.pallas import both_ways
from jaxserve.kernels.pallas.gpu import decode as gpu_decode
from jaxserve.kernels.pallas.gpu import extend as gpu_extend
from jaxserve.kernels.pallas.gpu import mla as gpu_mla


def _options(case: AttentionCase, config: Any, interpret: Any) -> dict[str, Any]:
    """What all kernels take."""
    return {
        "scale": case.scale,
        "sliding_window": case.sliding_window if case.is_causal else both_ways.causal_window(case.sliding_window),
        "soft_cap": case.soft_cap,
        "config": config,
        "interpret": interpret,
    }


def decode_plan(case: AttentionCase, inputs: AttentionInputs, config: gpu_decode.DecodeConfig) -> gpu_decode.DecodePlan:
    return gpu_decode.plan_decode(
        inputs.kv_lens,
        None if case.query_slots is None else jnp.diff(inputs.cu_q_lens),
        q_len=case.max_q_len,
        num_kv_heads=case.num_kv_heads,
        sliding_window=case.sliding_window,
        config=config,
    )


def decode(case: AttentionCase, inputs: AttentionInputs, config: gpu_decode.DecodeConfig, interpret: Any = None) -> Runnable:
    q, slots = inputs.q, case.query_slots
    if slots is not None:
        q = jnp.full((case.num_rows * case.max_q_len, *q.shape[1:]), jnp.nan, q.dtype).at[slots].set(q)
    q = q.reshape(case.num_rows, case.max_q_len, case.num_heads, case.head_dim)
    plan = jax.jit(lambda inputs: decode_plan(case, inputs, config))(inputs)
    options = _options(case, config, interpret)

    def call(index: jax.Array, out: jax.Array, operands: Any) -> jax.Array:
        q, inputs, plan = operands
        paged = (inputs.pool, inputs.scales, inputs.page_table, plan, inputs.rotation.offset(index))
        out = gpu_decode.paged_decode(q, *paged, head_dim_v=case.head_dim_v, sinks=inputs.sinks, **options)
        return out if slots is None else out.reshape(-1, *out.shape[2:])[slots]

    result = jax.eval_shape(call, jnp.int32(0), inputs.q, (q, inputs, plan))
    return Runnable(call, jnp.zeros(result.shape, result.dtype), (q, inputs, plan))


def extend_plan(case: AttentionCase, inputs: AttentionInputs, config: gpu_extend.ExtendConfig) -> gpu_extend.ExtendPlan:
    return gpu_extend.plan_extend(
        inputs.kv_lens,
        inputs.cu_q_lens,
        inputs.q.shape[0],
        group=case.num_heads // case.num_kv_heads,
        first_positions=None if case.is_causal else both_ways.first_positions(inputs.kv_lens, case.sliding_window),
        config=config,
    )


def extend(case: AttentionCase, inputs: AttentionInputs, config: gpu_extend.ExtendConfig, interpret: Any = None) -> Runnable:
    plan = jax.jit(lambda inputs: extend_plan(case, inputs, config))(inputs)
    options = _options(case, config, interpret)

    def call(index: jax.Array, out: jax.Array, operands: Any) -> jax.Array:
        inputs, plan = operands
        paged = (inputs.pool, inputs.scales, inputs.page_table, plan, inputs.rotation.offset(index))
        return gpu_extend.paged_extend(inputs.q, *paged, head_dim_v=case.head_dim_v, sinks=inputs.sinks, **options)

    shape = (inputs.q.shape[0], case.num_heads, case.head_dim_v)
    return Runnable(call, jnp.zeros(shape, inputs.q.dtype), (inputs, plan))


def mla_decode(case: AttentionCase, inputs: AttentionInputs, config: gpu_mla.MlaConfig, interpret: Any = None) -> Runnable:
    q_len = case.rows[0][0]
    q = inputs.q.reshape(case.num_rows, q_len, case.num_heads, case.head_dim)

    @jax.jit
    def make_plan(kv_lens: jax.Array) -> gpu_mla.MlaPlan:
        return gpu_mla.plan_mla_decode(
            kv_lens, q_len=q_len, num_heads=case.num_heads, sliding_window=case.sliding_window, config=config
        )

    options = _options(case, config, interpret)

    def call(index: jax.Array, out: jax.Array, operands: Any) -> jax.Array:
        q, inputs, plan = operands
        offset = inputs.rotation.offset(index)
        return gpu_mla.mla_decode(q, inputs.pool, inputs.page_table, plan, offset, latent_dim=case.head_dim_v, **options)

    return Runnable(call, jnp.zeros((*q.shape[:3], case.head_dim_v), q.dtype), (q, inputs, make_plan(inputs.kv_lens)))


def ragged_extend(
    case: AttentionCase, inputs: AttentionInputs, config: gpu_extend.ExtendConfig, interpret: Any = None
) -> Runnable:
    """Extend over contiguous keys and values, those of call 1's pages: what MLA's prefill does with what it has just expanded.

    They are one copy, since there they come out of the L2 if they fit.
    """
    keys, values, cu_kv_lens = jax.jit(lambda inputs: contiguous_kv(case, inputs))(inputs)
    group = case.num_heads // case.num_kv_heads
    num_tokens = inputs.q.shape[0]

    @jax.jit
    def make_plan(kv_lens: jax.Array, cu_q_lens: jax.Array) -> gpu_extend.ExtendPlan:
        return gpu_extend.plan_extend(kv_lens, cu_q_lens, num_tokens, group=group, cu_kv_lens=cu_kv_lens, config=config)

    options = _options(case, config, interpret)

    def call(index: jax.Array, out: jax.Array, operands: Any) -> jax.Array:
        q, keys, values, plan, rotation = operands
        # Nothing else depends on the call, and it would be moved out of the loop. This adds zero.
        plan = dataclasses.replace(plan, tiles=plan.tiles + rotation.offset(index))
        return gpu_extend.ragged_extend(q, keys, values, plan, sinks=inputs.sinks, **options)

    operands = (inputs.q, keys, values, make_plan(inputs.kv_lens, inputs.cu_q_lens), Rotation.of(1, 1))
    return Runnable(call, jnp.zeros((num_tokens, case.num_heads, case.head_dim_v), inputs.q.dtype), operands)


def contiguous_kv(case: AttentionCase, inputs: AttentionInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys [S, Hkv, Dk] and values [S, Hkv, Dv] of all rows, one behind the other, and their bounds int32 [R + 1]."""
    lens = [kv_len for _, kv_len in case.rows]
    row = np.repeat(np.arange(case.num_rows), lens)
    position = np.concatenate([np.arange(kv_len) for kv_len in lens])
    pages = inputs.page_table[row, position // case.page_size] + inputs.rotation.offset(jnp.int32(1))
    both = inputs.pool[pages, :, position % case.page_size]
    return both[..., : case.head_dim], both[..., case.head_dim :], jnp.asarray(np.cumsum([0, *lens]), jnp.int32)


Maker = Callable[[AttentionCase, AttentionInputs, Any, Any], Runnable]  # (case, inputs, config, interpret)
MAKERS: dict[str, Maker] = {"ragged extend": ragged_extend, "decode": decode, "extend": extend, "mla decode": mla_decode}


def compile_attention(op: str, case: AttentionCase, config: Any, plan: Plan, interpret: Any = None) -> Callable[[], Timing]:
    """`op` is a key of MAKERS. What compile_runnable returns."""
    return compile_runnable(case, lambda inputs: MAKERS[op](case, inputs, config, interpret), plan)


def time_attention(op: str, case: AttentionCase, config: Any, plan: Plan, interpret: Any = None) -> Timing:
    """Compiles and times it."""
    return compile_attention(op, case, config, plan, interpret)()
