"""Every kernel against the float32 reference, on fresh random inputs over a matrix of shapes and features.

Rows are ragged and awkward: no tokens, one token, exactly a page, a page and one. A check runs twice and must give the same
bits. Workers share the device here, so nothing is timed.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device import adapters, check_write
from benchmarks.device.case import Case, CompilerOptions, Measure, NotHereError, Numbers, Setting
from benchmarks.device.compare import compare
from benchmarks.device.kernels import config_for
from benchmarks.device.mla import mla_case
from benchmarks.device.reference import expected, make_step
from jaxserve.bench.attention import MAKERS
from jaxserve.bench.inputs import AttentionCase

Shapes = dict[str, AttentionCase]
PADDING_TOKENS = 7


def check_attention(op: str, case: AttentionCase, setting: Setting, options: CompilerOptions = None) -> Measure:
    """`op` is a key of MAKERS; padding tokens are only for extend, the others pad with rows of no tokens.

    The two runs read copies at different addresses: a CUDA graph must be updated between them.
    """
    seed = time.time_ns() % (1 << 31)
    step = make_step(case, seed, padding_tokens=PADDING_TOKENS if "extend" in op else 0)
    want = expected(step)
    try:
        runnable = MAKERS[op](case, step.inputs, config_for(op, case, setting), setting.interpret)
        program = jax.jit(lambda operands: runnable.call(jnp.int32(1), runnable.carry, operands))
        compiled = program.lower(runnable.operands).compile(compiler_options=options)
    except NotImplementedError as error:
        raise NotHereError(str(error)) from error

    copies = itertools.cycle((runnable.operands, jax.tree.map(jnp.copy, runnable.operands)))

    def measure() -> Numbers:
        found = compare(lambda: compiled(next(copies)).reshape(want.shape), want)
        return {"seed": seed, **found.as_dict(case.dtype)}

    return measure


def edge_lens(page_size: int, q_len: int = 1) -> tuple[int, ...]:
    """Lengths at which kernels go wrong, around pages and tiles of 64 and 128."""
    lens = (0, q_len, page_size, page_size + 1, 63, 64, 65, 127, 129, 1000, 1500)
    return tuple(kv_len for kv_len in lens if kv_len == 0 or kv_len >= q_len)


def decode_rows(page_size: int = 64, q_len: int = 1) -> tuple[tuple[int, int], ...]:
    return tuple((q_len, kv_len) for kv_len in edge_lens(page_size, q_len))


# (queries, tokens with them): of rows that verify drafts.
DRAFT_ROWS = ((8, 8), (1, 65), (0, 0), (3, 64), (8, 129), (5, 1000), (2, 1500))
# The same: fresh prompts, chunks on prefixes, single queries, rows without tokens between them.
EXTEND_ROWS = ((1, 1), (70, 70), (0, 0), (64, 64), (129, 300), (1, 513), (333, 333), (17, 1040), (256, 1280))
# Whole ones.
TEXTS = tuple((length, length) for length in (2, 64, 0, 300, 129, 65, 33, 1000))


def decode_shapes() -> Shapes:
    shapes: Shapes = {}

    def add(name: str, rows: tuple[tuple[int, int], ...] | None = None, **shape: Any) -> None:
        shapes[f"decode {name}"] = AttentionCase(rows or decode_rows(shape.get("page_size", 64)), **shape)

    add("32/8 D 128")
    add("float16", dtype="float16", kv_dtype="float16")
    for page_size in (8, 16, 32, 128, 256):
        add(f"pages of {page_size}", page_size=page_size)
    for dim in (64, 80, 96, 256):
        add(f"D {dim}", head_dim=dim, head_dim_v=dim)
    add("D 192/128", head_dim=192, head_dim_v=128)
    for heads, kv_heads in ((8, 8), (8, 1), (16, 1), (12, 4), (40, 8), (28, 4), (6, 2)):
        add(f"{heads}/{kv_heads} heads", num_heads=heads, num_kv_heads=kv_heads)
    for window in (1, 100, 128, 1024):
        add(f"window {window}", sliding_window=window)
    add("soft cap", soft_cap=30.0)
    add("sinks", uses_sinks=True)
    add("soft cap, sinks, window 77", soft_cap=20.0, uses_sinks=True, sliding_window=77)
    for q_len in (2, 3, 4, 8):
        add(f"{q_len} queries", decode_rows(64, q_len))
    for window in (None, 100):
        add(f"1 to 8 queries, window {window}", DRAFT_ROWS, sliding_window=window)
        add(f"1 to 8 queries, float8 KV, window {window}", DRAFT_ROWS, sliding_window=window, kv_dtype="float8_e4m3fn")
    add("4 queries, window 100, pages of 16", decode_rows(16, 4), sliding_window=100, page_size=16)
    for kv_dtype in ("float8_e4m3fn", "int8"):
        add(f"{kv_dtype} KV", kv_dtype=kv_dtype)
        add(f"{kv_dtype} KV, D 64, pages of 32", kv_dtype=kv_dtype, head_dim=64, head_dim_v=64, page_size=32)
        add(f"{kv_dtype} KV, 16/1 heads, window 100", kv_dtype=kv_dtype, num_heads=16, num_kv_heads=1, sliding_window=100)
    add("many short rows", tuple((1, 1 + 37 * row % 200) for row in range(100)))
    add("one long row", ((1, 20000),))
    return shapes


def extend_shapes() -> Shapes:
    shapes: Shapes = {}

    def add(name: str, rows: tuple[tuple[int, int], ...] = EXTEND_ROWS, **shape: Any) -> None:
        shapes[f"extend {name}"] = AttentionCase(rows, **shape)

    add("32/8 D 128")
    add("float16", dtype="float16", kv_dtype="float16")
    for page_size in (8, 16, 32, 128, 256):
        add(f"pages of {page_size}", page_size=page_size)
    for dim in (64, 80, 96, 256):
        add(f"D {dim}", head_dim=dim, head_dim_v=dim)
    add("D 192/128", num_heads=16, num_kv_heads=16, head_dim=192, head_dim_v=128)
    for heads, kv_heads in ((8, 8), (16, 1), (12, 4), (28, 4)):
        add(f"{heads}/{kv_heads} heads", num_heads=heads, num_kv_heads=kv_heads)
    for window in (1, 100, 1024):
        add(f"window {window}", sliding_window=window)
    add("soft cap", soft_cap=30.0)
    add("sinks", uses_sinks=True)
    add("soft cap, sinks, window 77, pages of 16", soft_cap=20.0, uses_sinks=True, sliding_window=77, page_size=16)
    for kv_dtype in ("float8_e4m3fn", "int8"):
        add(f"{kv_dtype} KV", kv_dtype=kv_dtype)
    for window in (None, 64, 1024):
        add(f"texts both ways, window {window}", TEXTS, sliding_window=window, is_causal=False)
    add("texts both ways, 12/12 heads, D 64", TEXTS, num_heads=12, num_kv_heads=12, head_dim=64, head_dim_v=64, is_causal=False)
    add("one row of 3000", ((3000, 3000),))
    add("chunk of 100 on 6000", ((100, 6100),))
    return shapes


def ragged_shapes() -> Shapes:
    """Over contiguous keys. Padding tokens stand behind the rows here, too."""
    heads: dict[str, Any] = {"head_dim": 192, "head_dim_v": 128}
    return {
        "ragged 16/16 heads, D 192/128": AttentionCase(EXTEND_ROWS, 16, 16, **heads),
        "ragged 32/8 heads, D 128": AttentionCase(EXTEND_ROWS),
        "ragged window 100": AttentionCase(EXTEND_ROWS, 16, 16, **heads, sliding_window=100),
        "ragged one row of 3000": AttentionCase(((3000, 3000),), 16, 16, **heads),
    }


def mla_shapes() -> Shapes:
    shapes = {}
    for num_heads, page_size, q_len in ((16, 64, 1), (128, 64, 1), (8, 16, 1), (64, 128, 1), (16, 64, 2), (32, 32, 4)):
        one = mla_case(1, 64, num_heads, page_size, q_len)
        name = f"mla decode {num_heads} heads, pages of {page_size}, {q_len} queries"
        shapes[name] = AttentionCase(**{**vars(one), "rows": decode_rows(page_size, q_len)})
    return shapes


def _smoke_shapes() -> dict[str, Shapes]:
    """What the canary leaves out."""
    ragged = AttentionCase(((5, 20), (9, 9)), 1, 1, head_dim=64, head_dim_v=64, page_size=16)
    texts = AttentionCase(((9, 9), (2, 2)), 2, 1, head_dim=64, head_dim_v=64, page_size=16, is_causal=False)
    return {"ragged extend": {"ragged small": ragged}, "extend": {"texts small": texts}}


def cases(setting: Setting) -> list[Case]:
    full = {
        "decode": decode_shapes,
        "extend": extend_shapes,
        "mla decode": mla_shapes,
        "ragged extend": ragged_shapes,
    }
    shapes = _smoke_shapes() if setting.smoke else {op: make() for op, make in full.items()}
    found = [Case(name, run) for name, run in _runs(shapes, setting)]
    others = {**check_write.checks(setting), **adapters.checks(setting)}
    found += [Case(name, functools.partial(run, setting)) for name, run in others.items()]
    # Kernels take turns, so that a budget that ends early has seen all of them.
    order = np.argsort([_place(case.name, found) for case in found], kind="stable")
    return [found[index] for index in order]


def _runs(shapes: dict[str, Shapes], setting: Setting) -> Iterator[tuple[str, Callable[[], Measure]]]:
    for op, named in shapes.items():
        for name, case in named.items():
            yield name, functools.partial(check_attention, op, case, setting)


def _place(name: str, cases: list[Case]) -> float:
    """Where in its own kernel's list a case stands, from 0 to 1."""
    own = [case.name for case in cases if case.name.split()[0] == name.split()[0]]
    return own.index(name) / len(own)
