"""MLA: decode in the absorbed form, where all heads of a token read one row of 512 + 64 numbers, and prefill over keys (192)
and values (128) that were just expanded from such rows and lie one behind the other."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.device.case import Case, Setting
from benchmarks.device.kernels import timed
from jaxserve.bench.inputs import AttentionCase, decode_case


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


def cases(setting: Setting) -> list[Case]:
    ops = {"mla decode": mla_shapes(setting), "ragged extend": prefill_shapes(setting)}
    return [
        Case(name, functools.partial(timed, op, shape, setting)) for op, shapes in ops.items() for name, shape in shapes.items()
    ]
