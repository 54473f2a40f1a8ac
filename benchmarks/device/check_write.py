"""The KV write against NumPy: rotated and normed queries and keys, values, quantization, and not a byte changed elsewhere."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.case import CompilerOptions, Measure, NotHereError, Numbers, Setting
from benchmarks.device.compare import LIMITS, relative_error
from jaxserve.kernels.metadata import NO_PAGE
from jaxserve.kernels.rotary import Rotary

# ||stored - exact|| / ||exact|| that quantizing to a type must cost: a uniform error of half a step, and room.
QUANTIZED_LIMITS = {"float8_e4m3fn": 4e-2, "int8": 1.5e-2}
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class WriteShape:
    num_tokens: int = 300
    num_kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    rotates: bool = True
    norms: bool = False


def checks(setting: Setting) -> dict[str, Callable[[Setting], Measure]]:
    if setting.smoke:
        shapes = {"small": WriteShape(9, 2, 2, 64, 16)}
    else:
        shapes = {
            "32/8 D 128": WriteShape(),
            "one token": WriteShape(num_tokens=1),
            "pages of 16": WriteShape(page_size=16),
            "D 64": WriteShape(head_dim=64),
            "D 256": WriteShape(head_dim=256),
            "D 80": WriteShape(head_dim=80),
            "8/8 heads": WriteShape(group=1),
            "no rotation": WriteShape(rotates=False),
            "norms": WriteShape(norms=True),
            "float16": WriteShape(dtype="float16", kv_dtype="float16"),
            "fp8 KV": WriteShape(kv_dtype="float8_e4m3fn"),
            "int8 KV": WriteShape(kv_dtype="int8"),
            "5000 tokens": WriteShape(num_tokens=5000),
        }
    return {f"write {name}": functools.partial(check_write, shape) for name, shape in shapes.items()}


def check_write(shape: WriteShape, setting: Setting, options: CompilerOptions = None) -> Measure:
    from jaxserve.kernels.pallas.gpu import write as gpu_write

    seed = time.time_ns() % (1 << 31)
    rng = np.random.default_rng(seed)
    qkv, rotary = _inputs(shape, rng)
    num_pages = -(-shape.num_tokens // shape.page_size) + 2
    slots = rng.permutation(num_pages * shape.page_size)[: shape.num_tokens]
    is_padding = rng.random(shape.num_tokens) < 0.1
    slot_pages = np.where(is_padding, NO_PAGE + np.arange(shape.num_tokens), slots // shape.page_size)
    pool, scales = _old_pool(shape, 2 * num_pages, rng)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def write(pool: jax.Array, scales: Any, qkv: jax.Array, rotary: Any, offset: jax.Array) -> Any:
        pages, offsets = jnp.asarray(slot_pages, jnp.int32), jnp.asarray(slots % shape.page_size, jnp.int32)
        return gpu_write.rope_and_write(qkv, rotary, pool, scales, pages, offsets, offset, interpret=setting.interpret)

    offset = jnp.int32(num_pages)
    try:
        lowered = write.lower(*jax.tree.map(jnp.asarray, (pool, scales)), qkv, rotary, offset)
        compiled = lowered.compile(compiler_options=options)
    except NotImplementedError as error:
        raise NotHereError(str(error)) from error
    live = np.flatnonzero(~is_padding)
    pages, offsets = slots[live] // shape.page_size + num_pages, slots[live] % shape.page_size

    def run() -> Any:
        return jax.tree.map(np.asarray, compiled(*jax.tree.map(jnp.asarray, (pool, scales)), qkv, rotary, offset))

    def measure() -> Numbers:
        first, second = run(), run()
        is_repeatable = all(a.tobytes() == b.tobytes() for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True))
        return {"seed": seed, **_judge(shape, first, (pool, scales), qkv, rotary, (live, pages, offsets), is_repeatable)}

    return measure


def _inputs(shape: WriteShape, rng: np.random.Generator) -> tuple[jax.Array, Rotary | None]:
    T, D = shape.num_tokens, shape.head_dim
    qkv = rng.standard_normal((T, shape.num_kv_heads, shape.group + 2, D), np.float32)
    angles = rng.uniform(0, 6.28, (T, D // 2))
    q_norm, k_norm = (jnp.asarray(rng.uniform(0.5, 1.5, D), jnp.dtype(shape.dtype)) if shape.norms else None for _ in range(2))
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    rotary = Rotary(cos, sin, q_norm, k_norm, eps=EPS) if shape.rotates else None
    return jnp.asarray(qkv, jnp.dtype(shape.dtype)), rotary


def _old_pool(shape: WriteShape, num_pages: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
    """Random bits, NaNs among them: what a write must leave alone."""
    dtype = jnp.dtype(shape.kv_dtype)
    page = (num_pages, shape.num_kv_heads, shape.page_size, 2 * shape.head_dim)
    pool = rng.integers(0, 256, (*page[:-1], page[-1] * dtype.itemsize), np.uint8).view(dtype)
    if shape.kv_dtype not in QUANTIZED_LIMITS:
        return pool, None
    return pool, rng.random((num_pages, shape.num_kv_heads, 2, shape.page_size), np.float32)


def _exact(shape: WriteShape, qkv: jax.Array, rotary: Rotary | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [T, Hkv * G, D], k and v [T, Hkv, D], in float64."""
    wide = np.asarray(qkv.astype(jnp.float32), np.float64)
    q, k, v = wide[:, :, :-2].reshape(wide.shape[0], -1, shape.head_dim), wide[:, :, -2], wide[:, :, -1]
    if rotary is None:
        return q, k, v
    rotated = []
    for x, weight in ((q, rotary.q_norm), (k, rotary.k_norm)):
        if weight is not None:
            x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * np.asarray(weight.astype(jnp.float32), np.float64)
        cos, sin = (np.asarray(one, np.float64)[:, None] for one in (rotary.cos, rotary.sin))
        first, second = np.split(x, 2, axis=-1)
        rotated.append(np.concatenate([first * cos - second * sin, second * cos + first * sin], -1))
    return rotated[0], rotated[1], v


def _judge(
    shape: WriteShape,
    result: tuple[np.ndarray, np.ndarray, np.ndarray | None],
    old: tuple[np.ndarray, np.ndarray | None],
    qkv: jax.Array,
    rotary: Rotary | None,
    written: tuple[np.ndarray, np.ndarray, np.ndarray],
    is_repeatable: bool,
) -> dict[str, Any]:
    """`written`: the live tokens, their pages and their places in them."""
    q, pool, scales = result
    live, pages, offsets = written
    exact_q, exact_k, exact_v = _exact(shape, qkv, rotary)
    stored = pool[pages, :, offsets].astype(np.float32)  # [T, Hkv, 2 D]
    if scales is not None:
        stored = stored * np.repeat(scales[pages, :, :, offsets], shape.head_dim, axis=-1)
    limit = LIMITS[shape.dtype][0]
    kv_limit = QUANTIZED_LIMITS.get(shape.kv_dtype, limit)
    errors = {
        "q": (relative_error(q[live].astype(np.float32), exact_q[live]), limit),
        "k": (relative_error(stored[..., : shape.head_dim], exact_k[live]), kv_limit),
        "v": (relative_error(stored[..., shape.head_dim :], exact_v[live]), kv_limit),
    }
    problems = [f"{name}: error {error:.2e} is above {most}" for name, (error, most) in errors.items() if not error <= most]
    is_untouched = _rest_is_untouched(pool, old[0], pages, offsets)
    if scales is not None and old[1] is not None:
        is_untouched &= _rest_is_untouched(np.swapaxes(scales, 2, 3), np.swapaxes(old[1], 2, 3), pages, offsets)
    problems += [] if is_untouched else ["something outside the written slots changed"]
    problems += [] if is_repeatable else ["two runs differ"]
    reason = {"reason": "; ".join(problems)} if problems else {}
    return {"status": "failed" if problems else "ok", **reason, "error": max(error for error, _ in errors.values())}


def _rest_is_untouched(pool: np.ndarray, old: np.ndarray, pages: np.ndarray, offsets: np.ndarray) -> bool:
    expected = old.copy()
    expected[pages, :, offsets] = pool[pages, :, offsets]
    return expected.tobytes() == pool.tobytes()
