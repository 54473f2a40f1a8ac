"""Our kernels as the sections call them: one config per shape, as a server would choose it, and small ones for smoke tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.case import Measure, NotHereError, Numbers, Setting
from jaxserve.bench.attention import compile_attention, decode_plan, extend_plan
from jaxserve.bench.inputs import AttentionCase, make_inputs
from jaxserve.bench.timing import Plan, Rotation, compile_calls
from jaxserve.kernels import tuning

# Blocks that the interpreter can run in a second or two.
_SMOKE_FIELDS = {"num_sms": 2, "num_blocks": 2, "streams": 1, "min_tiles": 1}
SMOKE_PLAN = Plan(repeats=1, most_calls=1)


def config_for(op: str, case: AttentionCase, setting: Setting) -> Any:
    shape = tuning.KernelShape(case.num_heads, case.num_kv_heads, case.head_dim, case.head_dim_v, case.page_size, case.kv_dtype)
    kind = jax.devices()[0].device_kind
    if op == "decode":
        config: Any = tuning.decode_config(kind, shape)
    elif op in ("extend", "ragged extend"):
        config = tuning.extend_config(kind, shape)
    else:
        from jaxserve.kernels.pallas.gpu import mla as gpu_mla

        config = gpu_mla.MlaConfig()
    if not setting.smoke:
        return config
    names = {field.name for field in dataclasses.fields(config)}
    return dataclasses.replace(config, **{name: value for name, value in _SMOKE_FIELDS.items() if name in names})


def timed(op: str, case: AttentionCase, setting: Setting) -> Measure:
    """Time, bytes and operations of one of jaxserve.bench.attention.MAKERS."""
    config = config_for(op, case, setting)
    try:
        time = compile_attention(op, case, config, SMOKE_PLAN if setting.smoke else Plan(), setting.interpret)
    except NotImplementedError as error:
        raise NotHereError(str(error)) from error

    def measure() -> Numbers:
        return {**time().as_dict(), "bytes": case.nbytes, "flop": case.flop, "config": dataclasses.asdict(config)}

    return measure


def timed_plan(op: str, case: AttentionCase, setting: Setting) -> Measure:
    """Of the division of work, which a step pays once for all its layers. It is a row of small XLA kernels."""
    config, plan = config_for(op, case, setting), SMOKE_PLAN if setting.smoke else Plan()
    make: Any = {"decode": decode_plan, "extend": extend_plan}[op]
    # Only lengths are read of the inputs: a pool of one page will do.
    inputs = make_inputs(dataclasses.replace(case, rows=((1, 1),)), 1)
    q_lens, kv_lens = zip(*case.rows, strict=True)
    inputs = dataclasses.replace(
        inputs,
        q=jnp.zeros((case.num_tokens, 1, 1)),
        kv_lens=jnp.asarray(kv_lens, jnp.int32),
        cu_q_lens=jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32),
        rotation=Rotation.of(1, 1),
    )

    def call(index: jax.Array, carry: Any, inputs: Any) -> Any:
        # Adds zero, so that the plan depends on the call.
        return make(case, dataclasses.replace(inputs, kv_lens=inputs.kv_lens + inputs.rotation.offset(index)), config)

    carry = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: make(case, inputs, config)))
    compiled = compile_calls(call, carry, inputs, plan.calls(50.0), plan)
    return lambda: dict(compiled.time()[0].as_dict())
