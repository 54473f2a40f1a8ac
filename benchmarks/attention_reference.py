"""Time of the reference attention per layer, against one dense gather of the whole page table.

    python -m benchmarks.attention_reference [--cases decode] [--dtype bfloat16] [--page-size 16]
    python -m benchmarks.attention_reference --kv-chunk-tokens 64 128 256 --block-kib 1024 2048 --no-dense

A case runs as in a model: a scan over layers that writes the step's keys and values into the donated pool and attends. Times
are microseconds per layer, the best of --rounds rounds in which all variants take turns, so that a busy machine slows them
alike; "cpu" is processor time, which a busy machine hardly changes. GB/s counts each row's keys and values once.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels import reference_pages
from jaxserve.kernels.api import AttentionMetadata, AttentionSpec, Chip
from jaxserve.kernels.reference import ReferenceAttention
from jaxserve.kernels.reference_loop import ReferenceTuning
from jaxserve.kernels.reference_pages import ReferenceKV

NUM_LAYERS = 2
LARGEST_DENSE_BYTES = 1 << 30
Rows = list[tuple[int, int]]
Timed = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows are (query_len, kv_len)."""

    name: str
    heads: tuple[int, int, int]  # query heads, KV heads, head_dim
    rows: Rows
    context_len: int  # width of the page table, in tokens
    num_tokens: int | None = None  # None: a decode step, of as many queries in each row as the longest has

    @property
    def kv_tokens(self) -> int:
        return sum(kv_len for _, kv_len in self.rows)

    @property
    def max_q_len(self) -> int:
        return max(query_len for query_len, _ in self.rows)


def prompts(*rows: tuple[int, int], num_rows: int) -> Rows:
    return [*rows, *[(0, 0)] * (num_rows - len(rows))]


TINY, DEMO, MID, LARGE = (4, 2, 128), (8, 4, 32), (8, 8, 64), (16, 8, 128)
LONG_AND_SHORT: Rows = [(1, 4096)] + [(1, 100)] * 63
CASES = [
    Case("decode tiny, 4 rows of 25-90", TINY, [(1, 25), (1, 90), (1, 60), (1, 40)], 2048),
    Case("decode tiny, 1 row of 60", TINY, [(1, 60)], 2048),
    Case("decode tiny, 1 of 16 rows live", TINY, prompts((1, 60), num_rows=16), 2048),
    Case("decode demo, 16 rows of 200", DEMO, [(1, 200)] * 16, 2048),
    Case("decode mid, 16 rows of 200", MID, [(1, 200)] * 16, 2048),
    Case("decode large, 64 rows of 256", LARGE, [(1, 256)] * 64, 512),
    Case("decode large, 1 of 4096, 63 of 100", LARGE, LONG_AND_SHORT, 4096),
    Case("decode demo, 1 of 4096, 63 of 100", DEMO, LONG_AND_SHORT, 4096),
    Case("decode large, 1 row of 4096", LARGE, [(1, 4096)], 4096),
    Case("verify demo, 8 rows of 200, 4 queries", DEMO, [(4, 200)] * 8, 1024),
    Case("verify demo as extend, 8 rows of 200, 4 queries", DEMO, [(4, 200)] * 8, 1024, 32),
    Case("verify demo, 8 rows of 200, 8 queries", DEMO, [(8, 200)] * 8, 1024),
    Case("verify demo as extend, 8 rows of 200, 8 queries", DEMO, [(8, 200)] * 8, 1024, 64),
    Case("extend tiny, 25 of 32 tokens", TINY, prompts((25, 25), num_rows=4), 2048, 32),
    Case("extend tiny, 16 x 30 tokens", TINY, [(30, 30)] * 16, 2048, 512),
    Case("extend demo, 16 x 30 tokens", DEMO, [(30, 30)] * 16, 2048, 512),
    Case("extend demo, first 512 of 2048", DEMO, prompts((512, 512), num_rows=16), 2048, 512),
    Case("extend demo, last 512 of 2048", DEMO, prompts((512, 2048), num_rows=16), 2048, 512),
    Case("extend large, first 512 of 2048", LARGE, prompts((512, 512), num_rows=16), 2048, 512),
    Case("extend large, last 512 of 2048", LARGE, prompts((512, 2048), num_rows=16), 2048, 512),
    Case("extend large, 60 on a prefix of 1500", LARGE, prompts((60, 1560), num_rows=4), 2048, 64),
    Case("mixed demo, 15 decode rows and 400", DEMO, [(1, 200)] * 15 + [(400, 400)], 2048, 512),
]


def step_metadata(backend: ReferenceAttention, case: Case, page_size: int, num_pages: int) -> AttentionMetadata:
    rng = np.random.default_rng(0)
    free = list(rng.permutation(num_pages))
    table = np.zeros((len(case.rows), -(-case.context_len // page_size)), np.int32)
    slots: list[tuple[int, int]] = []
    for row, (query_len, kv_len) in enumerate(case.rows):
        count = -(-kv_len // page_size)
        table[row, :count] = [free.pop() for _ in range(count)]
        slots += [(table[row, p // page_size], p % page_size) for p in range(kv_len - query_len, kv_len)]
    q_lens = [query_len for query_len, _ in case.rows]
    num_tokens = case.num_tokens or len(case.rows) * case.max_q_len
    slots += [(1 << 30, 0)] * (num_tokens - len(slots))
    step = AttentionMetadata(
        kv_lens=jnp.asarray([kv_len for _, kv_len in case.rows], jnp.int32),
        cu_q_lens=jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32),
        page_table=jnp.asarray(table),
        slot_pages=jnp.asarray([page for page, _ in slots], jnp.int32),
        slot_offsets=jnp.asarray([offset for _, offset in slots], jnp.int32),
        decode_q_len=case.max_q_len if case.num_tokens is None else None,
    )
    return backend.plan(step)


@dataclasses.dataclass(frozen=True)
class DenseAttention(ReferenceAttention):
    """Gathers every page-table entry of every row, then attends to a rectangle. Prompts are padded to the longest."""

    max_q_len: int = 1

    def ragged_paged_attention(
        self, q: jax.Array, kv_cache: ReferenceKV, metadata: AttentionMetadata, page_offset: Any, *, scale: float, **_: Any
    ) -> jax.Array:
        T, Hq, D = q.shape
        keys = reference_pages.read(kv_cache, metadata.page_table + page_offset, reference_pages.KEYS)
        values = reference_pages.read(kv_cache, metadata.page_table + page_offset, reference_pages.VALUES)
        R, Hkv, length = keys.shape[:3]
        q_lens = metadata.cu_q_lens[1:] - metadata.cu_q_lens[:-1]
        in_row = jnp.arange(self.max_q_len)
        token = jnp.where(in_row < q_lens[:, None], metadata.cu_q_lens[:-1, None] + in_row, T)
        queries = q.at[token].get(mode="clip").reshape(R, self.max_q_len, Hkv, Hq // Hkv, D).astype(jnp.float32)
        positions = (metadata.kv_lens - q_lens)[:, None] + in_row
        scores = jnp.einsum("rqhgd,rhcd->rhgqc", queries, keys) * scale
        scores = jnp.where((jnp.arange(length) <= positions[:, :, None])[:, None, None], scores, -1e30)
        out = jnp.einsum("rhgqc,rhcd->rqhgd", jax.nn.softmax(scores), values).reshape(R, self.max_q_len, Hq, D)
        return jnp.zeros(q.shape, jnp.float32).at[token].set(out, mode="drop").astype(q.dtype)


def prepare(backend: ReferenceAttention, case: Case, dtype: Any, page_size: int) -> Timed:
    """Compiles the case; the returned function runs it once."""
    Hq, Hkv, D = case.heads
    num_pages = sum(-(-kv_len // page_size) for _, kv_len in case.rows)
    metadata = step_metadata(backend, case, page_size, num_pages)
    rng = np.random.default_rng(0)
    # Every KV head's queries, key and value; the queries of the second layer are the results of the first.
    qkv = jnp.asarray(rng.standard_normal((metadata.num_tokens, Hkv, Hq // Hkv + 2, D)), dtype)
    pool = jax.tree.map(lambda page: jnp.zeros((NUM_LAYERS * num_pages, *page.shape), page.dtype), backend.kv_pages())

    def run_layers(pool: ReferenceKV, qkv: jax.Array) -> tuple[ReferenceKV, jax.Array]:
        def layer(carry: tuple[jax.Array, jax.Array], index: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            pool, x = carry
            q, pool = backend.rope_and_write(x, None, pool, metadata, index * num_pages)
            out = backend.ragged_paged_attention(q, pool, metadata, index * num_pages, scale=D**-0.5)
            return (pool, x.at[:, :, :-2].add(out.reshape(len(x), Hkv, -1, D))), None

        return jax.lax.scan(layer, (pool, qkv), jnp.arange(NUM_LAYERS, dtype=jnp.int32))[0]

    compiled = jax.jit(run_layers, donate_argnums=0).lower(pool, qkv).compile()
    state = [pool]

    def run() -> None:
        state[0], _ = jax.block_until_ready(compiled(state[0], qkv))

    run()
    return run


def best_us(variants: dict[str, Timed], rounds: int) -> dict[str, tuple[float, float]]:
    """Name -> best wall and processor time per layer. A turn lasts at least a few milliseconds."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            wall, cpu, count = time.perf_counter(), time.process_time(), 0
            while time.perf_counter() - wall < 5e-3 or count == 0:
                run()
                count += 1
            scale = 1e6 / (count * NUM_LAYERS)
            times[name].append(((time.perf_counter() - wall) * scale, (time.process_time() - cpu) * scale))
    return {name: (min(wall for wall, _ in turns), min(cpu for _, cpu in turns)) for name, turns in times.items()}


def variants_of(case: Case, options: argparse.Namespace) -> dict[str, ReferenceAttention]:
    Hq, Hkv, D = case.heads
    spec = AttentionSpec(Chip.of(jax.devices()[0]), Hq, Hkv, D, options.dtype, options.dtype, options.page_size)
    variants: dict[str, ReferenceAttention] = {}
    for chunk, tile, kib in itertools.product(options.kv_chunk_tokens, options.q_tile_tokens, options.block_kib):
        tuning = ReferenceTuning(kv_chunk_tokens=chunk, q_tile_tokens=tile, block_bytes=kib << 10)
        variants[f"chunk {chunk} tile {tile} block {kib} KiB"] = ReferenceAttention(spec, tuning)
    if options.dense and 8 * len(case.rows) * case.context_len * Hkv * D <= LARGEST_DENSE_BYTES:
        variants["dense"] = DenseAttention(spec, max_q_len=case.max_q_len)
    return variants


def main() -> None:
    default = ReferenceTuning()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--page-size", type=int, default=ReferenceAttention.default_page_size)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dense", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kv-chunk-tokens", type=int, nargs="+", default=[default.kv_chunk_tokens])
    parser.add_argument("--q-tile-tokens", type=int, nargs="+", default=[default.q_tile_tokens])
    parser.add_argument("--block-kib", type=int, nargs="+", default=[default.block_bytes >> 10])
    options = parser.parse_args()
    dtype = jnp.dtype(options.dtype)
    for case in CASES:
        if options.cases not in case.name:
            continue
        backends = variants_of(case, options)
        timed = {name: prepare(backend, case, dtype, options.page_size) for name, backend in backends.items()}
        results = best_us(timed, options.rounds)
        kv_bytes = case.kv_tokens * 2 * case.heads[1] * case.heads[2] * dtype.itemsize
        print(f"{case.name}: {kv_bytes / 1e6:.1f} MB of keys and values")
        for name, (wall, cpu) in results.items():
            ratio = f"  dense/this {results['dense'][0] / wall:6.1f}" if "dense" in results else ""
            print(f"  {name:36s} {wall:9.0f} us  cpu {cpu:9.0f} us  {kv_bytes / wall / 1e3:6.2f} GB/s{ratio}", flush=True)


if __name__ == "__main__":
    main()
