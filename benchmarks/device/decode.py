"""Decode: one query per row against its pages. Bound by the bytes of keys and values."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.device.case import Case, Setting
from benchmarks.device.kernels import timed, timed_plan
from benchmarks.device.predictions import PREDICTIONS
from jaxserve.bench.inputs import AttentionCase, decode_case

BATCHES, CONTEXTS = (64, 4, 16, 256), (4096, 1024, 16384)


def decode_shapes(setting: Setting) -> dict[str, AttentionCase]:
    """Name -> case, those first of which something was predicted: a short budget still reaches them."""
    if setting.smoke:
        small = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "head_dim_v": 64, "page_size": 16}
        return {"decode 2 x 20": decode_case(2, 20, **small)}
    shapes = {f"decode {batch} x {context}": decode_case(batch, context) for context in CONTEXTS for batch in BATCHES}
    others: dict[str, dict[str, Any]] = {
        "fp8 KV": {"kv_dtype": "float8_e4m3fn"},
        "int8 KV": {"kv_dtype": "int8"},
        "MHA 32/32": {"num_kv_heads": 32},
        "D 64": {"head_dim": 64, "head_dim_v": 64},
        "D 256": {"head_dim": 256, "head_dim_v": 256},
        "pages of 16": {"page_size": 16},
        "4 queries": {"q_len": 4},
    }
    for name, shape in others.items():
        shapes[f"decode 64 x 4096, {name}"] = decode_case(64, 4096, **shape)
    shapes["decode 1 x 4096"] = decode_case(1, 4096)
    shapes["decode 64 x 16384, window 4096"] = decode_case(64, 16384, sliding_window=4096)
    shapes["decode 16 x 4096, fp8 KV"] = decode_case(16, 4096, kv_dtype="float8_e4m3fn")
    ragged = tuple((1, context) for context in (512, 1024, 2048, 8192) for _ in range(16))
    shapes["decode ragged, 64 rows of 512..8192"] = AttentionCase(ragged)
    predicted = {prediction.case for prediction in PREDICTIONS}
    return dict(sorted(shapes.items(), key=lambda item: item[0] not in predicted))


def cases(setting: Setting) -> list[Case]:
    shapes = decode_shapes(setting)
    first = next(iter(shapes.values()))
    return [
        *(Case(name, functools.partial(timed, "decode", shape, setting)) for name, shape in shapes.items()),
        Case(f"plan of decode, {first.num_rows} rows", functools.partial(timed_plan, "decode", first, setting)),
    ]
