"""Extend: prompts and chunks of them against their pages, and whole texts of encoders. Bound by the tensor cores."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.device.case import Case, Setting
from benchmarks.device.kernels import timed, timed_plan
from jaxserve.bench.inputs import AttentionCase

# BERT's and ModernBERT's: of base size 12 heads of 64.
ENCODER: dict[str, Any] = {"num_heads": 12, "num_kv_heads": 12, "head_dim": 64, "head_dim_v": 64, "is_causal": False}


def extend_shapes(setting: Setting) -> dict[str, AttentionCase]:
    if setting.smoke:
        rows = ((5, 5), (3, 20))
        return {"extend ragged": AttentionCase(rows, 2, 1, head_dim=64, head_dim_v=64, page_size=16)}
    mixed = ((2048, 2048), (1024, 5120), (512, 512), (1000, 1000), (333, 4429), (1500, 1500), (64, 8256), (1711, 3759))
    return {
        "extend 16384": AttentionCase(((16384, 16384),)),
        "extend 4096": AttentionCase(((4096, 4096),)),
        "extend 2048 on 14336": AttentionCase(((2048, 16384),)),
        "extend 8 ragged rows": AttentionCase(mixed),
        "extend 4 x 4096": AttentionCase(((4096, 4096),) * 4),
        "extend 16384, window 4096": AttentionCase(((16384, 16384),), sliding_window=4096),
        "extend 4096, D 64": AttentionCase(((4096, 4096),), head_dim=64, head_dim_v=64),
        "extend 4096, D 256": AttentionCase(((4096, 4096),), 16, 4, head_dim=256, head_dim_v=256),
        "extend 4096, fp8 KV": AttentionCase(((4096, 4096),), kv_dtype="float8_e4m3fn"),
        "extend 64 x 512 both ways": AttentionCase(((512, 512),) * 64, **ENCODER),
        "extend 8 x 4096 both ways, window 65": AttentionCase(((4096, 4096),) * 8, **ENCODER, sliding_window=65),
        "extend 4096, MLA 16 x 192/128": AttentionCase(((4096, 4096),), 16, 16, head_dim=192, head_dim_v=128),
    }


def cases(setting: Setting) -> list[Case]:
    shapes = extend_shapes(setting)
    widest = max(shapes.values(), key=lambda shape: (shape.is_causal, shape.num_rows))
    return [
        *(Case(name, functools.partial(timed, "extend", shape, setting)) for name, shape in shapes.items()),
        Case(f"plan of extend, {widest.num_rows} rows", functools.partial(timed_plan, "extend", widest, setting)),
    ]
