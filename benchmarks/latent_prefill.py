"""Latent attention of prompts, one layer of it: absorbed, as decode steps are, and divided, as a server does it.

    python -m benchmarks.latent_prefill [--heads 16] [--dtype float32] [--rounds 5]

Heads are DeepSeek-V3's. Measured is all that comes between the projected queries and the projection of the values, on the
backend that a server would choose here. The two ways run in turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.api import AttentionMetadata, AttentionSpec, Chip, LatentBackend, choose_latent_backend
from jaxserve.kernels.latent import Projections
from jaxserve.kernels.latent_parts import Division
from jaxserve.kernels.spec import ProjectedHead

LATENT_DIM = 512
HEAD = ProjectedHead(nope_dim=128, rope_dim=64, value_dim=128)
SCALE = HEAD.key_dim**-0.5
WAYS = {"absorbed": Division(fewest_tokens=1 << 30), "divided": Division()}

Rows = tuple[tuple[int, int], ...]  # of each its queries, and its keys with them
CASES: dict[str, Rows] = {
    "a prompt of 512": ((512, 512),),
    "a prompt of 2048": ((2048, 2048),),
    "512 behind 3584 in the cache": ((512, 4096),),
    "8 prompts of 256": ((256, 256),) * 8,
    "16 of 32 behind 1024 each": ((32, 1056),) * 16,
    "a prompt of 1024 beside 32 that decode at 1024": (*((1, 1024),) * 32, (1024, 1024)),
}


class Step(NamedTuple):
    q: jax.Array
    projections: Projections
    pool: Any
    arguments: dict[str, jax.Array]


def spec_of(num_heads: int, dtype: str) -> AttentionSpec:
    chip = Chip.of(jax.devices()[0])
    return AttentionSpec(chip, num_heads, 1, LATENT_DIM + HEAD.rope_dim, dtype, dtype, latent_dim=LATENT_DIM, projected=HEAD)


def make_step(backend: LatentBackend, rows: Rows) -> Step:
    """Its keys are in the cache, all of them; nothing is written."""
    spec = backend.spec
    assert spec.page_size is not None
    counts = [-(-kv_len // spec.page_size) for _, kv_len in rows]
    table = np.zeros((len(rows), max(counts)), np.int32)
    pages = iter(np.random.default_rng(0).permutation(sum(counts)))
    for row, count in enumerate(counts):
        table[row, :count] = [next(pages) for _ in range(count)]
    num_tokens = sum(q_len for q_len, _ in rows)
    keys = iter(jax.random.split(jax.random.key(0), 16))

    def draw(shape: tuple[int, ...], dtype: Any = spec.dtype) -> jax.Array:
        return jax.random.normal(next(keys), shape).astype(dtype)

    up = (draw((spec.num_heads, n, LATENT_DIM)) * LATENT_DIM**-0.5 for n in (HEAD.nope_dim, HEAD.value_dim))
    pool = jax.tree.map(lambda page: draw((sum(counts), *page.shape), page.dtype), backend.kv_pages())
    arguments = {
        "kv_lens": [kv_len for _, kv_len in rows],
        "cu_q_lens": np.cumsum([0, *(q_len for q_len, _ in rows)]),
        "page_table": table,
        "slot_pages": np.zeros(num_tokens),
        "slot_offsets": np.zeros(num_tokens),
    }
    return Step(
        draw((num_tokens, spec.num_heads, HEAD.key_dim)),
        Projections(*(x.astype(spec.dtype) for x in up)),
        pool,
        {name: jnp.asarray(array, jnp.int32) for name, array in arguments.items()},
    )


def attend(backend: LatentBackend, step: Step, page_offset: jax.typing.ArrayLike = 0) -> jax.Array:
    metadata = backend.plan(AttentionMetadata(**step.arguments, decode_q_len=None))
    return backend.attend(step.q, step.projections, step.pool, metadata, page_offset, scale=SCALE)


def runner(backend: LatentBackend, step: Step) -> Callable[[], jax.Array]:
    program = jax.jit(lambda step: attend(backend, step))
    return lambda: jax.block_until_ready(program(step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    backend = choose_latent_backend("auto", spec_of(args.heads, args.dtype))
    print(f"{jax.devices()[0].device_kind}, backend {backend.name}, {args.heads} heads, {args.dtype}; medians in ms")
    print(f"{'':50}{'absorbed':>10}{'divided':>10}{'ratio':>8}{'error':>10}")
    for name, rows in CASES.items():
        step = make_step(backend, rows)
        runners = {way: runner(dataclasses.replace(backend, division=division), step) for way, division in WAYS.items()}
        results = {way: run() for way, run in runners.items()}
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way, run in runners.items():
                start = time.perf_counter()
                run()
                seconds[way].append(time.perf_counter() - start)
        absorbed, divided = (1e3 * statistics.median(seconds[way]) for way in WAYS)
        error = float(jnp.max(jnp.abs(results["absorbed"] - results["divided"]).astype(jnp.float32)))
        print(f"{name:50}{absorbed:10.1f}{divided:10.1f}{absorbed / divided:8.2f}{error:10.1e}")


if __name__ == "__main__":
    main()
