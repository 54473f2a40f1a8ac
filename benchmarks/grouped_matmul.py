"""Ways to multiply rows with their groups' matrices, measured on this machine: what `jaxserve.models.grouped` chose from.

python -m benchmarks.grouped_matmul [--groups 32] [--size-in 512] [--size-out 768]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.grouped import _tiled

Way = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
REPEATS = 5
LARGEST_BYTES = 1 << 31  # a way that writes more is left out


def one_hot(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """Every row times every matrix."""
    chosen = jax.nn.one_hot(_groups(sizes, len(x)), len(sizes), dtype=x.dtype)
    return jnp.einsum("tg,tk,gkn->tn", chosen, x, matrices)


def gather(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """Every row with a copy of its matrix."""
    return jnp.einsum("tk,tkn->tn", x, matrices[_groups(sizes, len(x))])


def tiles_of(tile: int) -> Way:
    return lambda x, matrices, sizes: _tiled(x, matrices, sizes, tile)


WAYS: Mapping[str, Way] = {
    "ragged_dot": jax.lax.ragged_dot,
    "one-hot": one_hot,
    "gather": gather,
    **{f"tiles of {tile}": tiles_of(tile) for tile in (1, 8, 32, 128)},
}


def _groups(sizes: jax.Array, num_rows: int) -> jax.Array:
    return jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=num_rows)


def best_ms(way: Way, *arrays: jax.Array) -> float:
    run = jax.jit(way)
    run(*arrays).block_until_ready()
    seconds = []
    for _ in range(REPEATS):
        started_s = time.perf_counter()
        run(*arrays).block_until_ready()
        seconds.append(time.perf_counter() - started_s)
    return 1e3 * min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--size-in", type=int, default=512)
    parser.add_argument("--size-out", type=int, default=768)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    shape = (options.groups, options.size_in, options.size_out)
    matrices = jnp.asarray(random.standard_normal(shape, np.float32))
    print(f"| rows | {' | '.join(WAYS)} |")
    print(f"|--:|{'--:|' * len(WAYS)}")
    for rows in (8, 64, 2048):
        x = jnp.asarray(random.standard_normal((rows, options.size_in), np.float32))
        sizes = jnp.asarray(np.bincount(random.integers(0, options.groups, rows), minlength=options.groups), jnp.int32)
        cells = []
        for name, way in WAYS.items():
            too_large = name == "gather" and 4 * rows * options.size_in * options.size_out > LARGEST_BYTES
            cells.append("-" if too_large else f"{best_ms(way, x, matrices, sizes):.1f}")
        print(f"| {rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
