"""The gated delta net's recurrence on this CPU, ours and Transformers' in turns: decode steps, and prompts in chunks.

    python -m benchmarks.recurrence [--rows 16] [--tokens 1024] [--rounds 7]

Heads are those of Qwen3-Next on one of eight devices (2 of keys, 4 of values, 128 x 128 each), in float32. Of a decode step a
state is read and written once at least; that is set against a plain read of as many bytes, in the same turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from jaxserve.kernels.recurrence import recur
from jaxserve.kernels.recurrence_arrays import Recurrence
from jaxserve.kernels.state_rows import StateRows

GROUPS, PER_GROUP, DIM = 2, 2, 128
LEAST_REPEATS_S = 0.2
THREADS = os.cpu_count() or 1


def draw(num_tokens: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((num_tokens, GROUPS, DIM)).astype(np.float32) for _ in range(2))
    v = rng.standard_normal((num_tokens, GROUPS * PER_GROUP, DIM)).astype(np.float32)
    decay = -rng.uniform(0.001, 0.5, v.shape[:2]).astype(np.float32)
    return {"q": q, "k": k, "v": v, "decay": decay, "rate": rng.uniform(0.1, 0.9, v.shape[:2]).astype(np.float32)}


def state_rows(lens: list[int]) -> StateRows:
    num_rows, ends = len(lens), np.cumsum([0, *lens])
    lines, is_new = jnp.arange(num_rows, dtype=jnp.int32), jnp.zeros(num_rows, bool)
    if max(lens) == 1:
        return StateRows.in_turn(sources=lines, is_new=is_new, targets=lines[:, None])
    return StateRows.in_chunks(
        sources=lines,
        is_new=is_new,
        cu_q_lens=jnp.array(ends, jnp.int32),
        row_index=jnp.array(np.repeat(np.arange(num_rows), lens), jnp.int32),
        cuts=jnp.zeros((num_rows, 0), jnp.int32),
        targets=lines[:, None],
    )


def ours(arrays: dict[str, np.ndarray], lens: list[int]) -> Callable[[], Any]:
    def unit(x: np.ndarray) -> jax.Array:
        return jnp.array(x / np.linalg.norm(x, axis=-1, keepdims=True))

    grouped = {
        name: arrays[name].reshape(len(arrays[name]), GROUPS, PER_GROUP, *arrays[name].shape[2:])
        for name in ("v", "decay", "rate")
    }
    inputs = Recurrence(
        unit(arrays["q"]) * DIM**-0.5, unit(arrays["k"]), *(jnp.array(grouped[name]) for name in ("v", "decay", "rate"))
    )
    step = jax.jit(recur, donate_argnums=1)
    held = [jnp.zeros((len(lens), GROUPS * PER_GROUP, DIM, DIM), jnp.float32)]
    rows = state_rows(lens)

    def run() -> Any:
        out, held[0] = step(inputs, held[0], rows)
        return jax.block_until_ready(out)

    return run


def of_transformers(arrays: dict[str, np.ndarray], lens: list[int], *, in_chunks: bool) -> Callable[[], Any]:
    """Rows of one length."""
    shaped = {name: torch.tensor(array).reshape(len(lens), lens[0], *array.shape[1:]) for name, array in arrays.items()}
    function = theirs.torch_chunk_gated_delta_rule if in_chunks else theirs.torch_recurrent_gated_delta_rule
    state = torch.zeros(len(lens), GROUPS * PER_GROUP, DIM, DIM)

    def run() -> Any:
        with torch.no_grad():
            return function(
                shaped["q"], shaped["k"], shaped["v"], g=shaped["decay"], beta=shaped["rate"],
                initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
            )[0]  # fmt: skip

    return run


def plain_read(num_bytes: int) -> Callable[[], Any]:
    parts = np.array_split(np.ones(num_bytes // 4, np.float32), THREADS)
    pool = ThreadPoolExecutor(THREADS)
    return lambda: list(pool.map(np.max, parts))


def seconds(run: Callable[[], Any]) -> float:
    """Of one call, of as many as take LEAST_REPEATS_S."""
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < LEAST_REPEATS_S:
        run()
        count += 1
    return (time.perf_counter() - started) / count


def compare(name: str, ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Prints the medians; the ratios are of the same round."""
    first, other = list(ways)[:2]
    np.testing.assert_allclose(np.ravel(ways[first]()), np.ravel(ways[other]()), atol=2e-3)
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            taken[way].append(seconds(run))
    medians = {way: statistics.median(of_way) for way, of_way in taken.items()}
    ratios = sorted(theirs_s / ours_s for ours_s, theirs_s in zip(taken[first], taken[other], strict=True))
    print(name)
    for way, median in medians.items():
        print(f"  {way:<14}{median * 1000:8.2f} ms")
    print(f"  ratio         {statistics.median(ratios):8.2f}  ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return medians


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    torch.set_num_threads(THREADS)
    each, whole = [1] * asked.rows, [asked.tokens]
    state_bytes = asked.rows * GROUPS * PER_GROUP * DIM * DIM * 4
    arrays = draw(asked.rows)
    ways = {"jaxserve": ours(arrays, each), "Transformers": of_transformers(arrays, each, in_chunks=False)}
    medians = compare(f"decode, {asked.rows} rows", ways | {"plain read": plain_read(2 * state_bytes)}, asked.rounds)
    print(f"  states read and written: {2 * state_bytes / 1e6:.0f} MB, {2 * state_bytes / medians['jaxserve'] / 1e9:.1f} GB/s")
    arrays = draw(asked.tokens)
    ways = {"jaxserve": ours(arrays, whole), "Transformers": of_transformers(arrays, whole, in_chunks=True)}
    medians = compare(f"a prompt of {asked.tokens} tokens", ways, asked.rounds)
    print(f"  {medians['jaxserve'] / asked.tokens * 1e6:.1f} us a token and layer")


if __name__ == "__main__":
    main()
