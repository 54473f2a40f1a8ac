"""MLA: decode in the absorbed form, where all heads of a token read one row of 512 + 64 numbers; prefill over keys (192) and
values (128) that lie one behind the other; and prompts as a server attends to them, absorbed and divided, from projected
queries to what is projected to values. Where these two are equal `Division.fewest_tokens` should be."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import latent_prefill
from benchmarks.device.case import Case, Measure, Setting
from benchmarks.device.kernels import SMOKE_PLAN, timed
from jaxserve.bench.inputs import AttentionCase, decode_case
from jaxserve.bench.timing import Plan, Rotation, compile_calls
from jaxserve.kernels.api import choose_latent_backend


def mla_case(batch: int, context: int, num_heads: int, page_size: int = 64, q_len: int = 1) -> AttentionCase:
    return decode_case(
        batch,
        context,
        q_len,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=576,
        head_dim_v=512,
        page_size=page_size,
        value_in_key=True,
    )


def mla_shapes(setting: Setting) -> dict[str, AttentionCase]:
    if setting.smoke:
        return {"mla decode 1 x 20, 8 heads": mla_case(1, 20, 8, page_size=16)}
    return {
        f"mla decode {batch} x {context}, {num_heads} heads": mla_case(batch, context, num_heads)
        for num_heads in (128, 16)
        for batch, context in ((64, 4096), (4, 4096), (16, 16384), (128, 4096))
    }


def prefill_shapes(setting: Setting) -> dict[str, AttentionCase]:
    heads: dict[str, Any] = {"head_dim": 192, "head_dim_v": 128}
    if setting.smoke:
        return {"ragged prefill": AttentionCase(((5, 20),), 1, 1, page_size=16, **heads)}
    return {
        "ragged prefill 4096, 128 heads": AttentionCase(((4096, 4096),), 128, 128, **heads),
        "ragged prefill 16384, 16 heads": AttentionCase(((16384, 16384),), 16, 16, **heads),
    }


def time_prompts(rows: latent_prefill.Rows, way: str, num_heads: int, setting: Setting) -> Measure:
    chosen = choose_latent_backend("auto", latent_prefill.spec_of(num_heads, "bfloat16"))
    backend = dataclasses.replace(chosen, division=latent_prefill.WAYS[way])
    step = latent_prefill.make_step(backend, rows)

    def call(index: jax.Array, _: jax.Array, operands: tuple[latent_prefill.Step, Rotation]) -> jax.Array:
        step, rotation = operands
        return latent_prefill.attend(backend, step, page_offset=rotation.offset(index))

    out = jax.eval_shape(lambda: latent_prefill.attend(backend, step))
    plan = SMOKE_PLAN if setting.smoke else Plan()
    carry, operands = jnp.zeros(out.shape, out.dtype), (step, Rotation.of(1, 1))
    compiled = compile_calls(call, carry, operands, plan.calls(1000.0), plan)
    return lambda: {**compiled.time()[0].as_dict(), "backend": backend.name}


def prompt_shapes(setting: Setting) -> dict[str, tuple[latent_prefill.Rows, int]]:
    if setting.smoke:
        return {"latents 180, 1 head": (((180, 180),), 1)}
    sizes = {f"latents {n}, 16 heads": (((n, n),), 16) for n in (256, 512, 1024, 2048, 4096, 8192)}
    return {
        **sizes,
        "latents 1024 on 15360, 16 heads": (((1024, 16384),), 16),
        "latents 8192 on 24576, 16 heads": (((8192, 32768),), 16),
        "latents 2048, 128 heads": (((2048, 2048),), 128),
    }


def cases(setting: Setting) -> list[Case]:
    ops = {"mla decode": mla_shapes(setting), "ragged extend": prefill_shapes(setting)}
    kernels = [
        Case(name, functools.partial(timed, op, shape, setting)) for op, shapes in ops.items() for name, shape in shapes.items()
    ]
    prompts = [
        Case(f"{name}, {way}", functools.partial(time_prompts, rows, way, num_heads, setting))
        for name, (rows, num_heads) in prompt_shapes(setting).items()
        for way in latent_prefill.WAYS
    ]
    return kernels + prompts
