"""Time of the sampling program by mode, and of top_k and top_p against a sort of the vocabulary.

    python -m benchmarks.sampler [--rows 16] [--vocab-size 128256]

Milliseconds per step, the best of --rounds rounds in which all variants take turns, so that a busy machine slows them alike.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.executor import sampler
from jaxserve.executor.row_params import RowParams, row_params_from_state, split_row_params
from jaxserve.executor.sampler import SamplingMode
from jaxserve.runner import RowState
from jaxserve.types import SamplingParams

MODES = (SamplingMode.GREEDY, SamplingMode.DRAW, SamplingMode.LIMITED)  # EVERYTHING needs a step's row tables


def draw_with_a_sort(logits: jax.Array, params: RowParams, seq_lens: jax.Array) -> jax.Array:
    """top_k and top_p as they are usually written: on sorted logits."""
    scaled = logits / params.temperature[:, None]
    order = jnp.argsort(-scaled, axis=-1)
    ordered = jnp.take_along_axis(scaled, order, axis=-1)
    kept = jnp.arange(logits.shape[1]) < params.top_k[:, None]
    probs = jax.nn.softmax(jnp.where(kept, ordered, -jnp.inf), axis=-1)
    kept &= jnp.cumsum(probs, axis=-1) - probs < params.top_p[:, None]
    noisy = jnp.where(kept, ordered, -jnp.inf) + sampler._gumbel(params, seq_lens, logits.shape[1])
    return jnp.take_along_axis(order, jnp.argmax(noisy, axis=-1)[:, None], axis=-1)[:, 0]


def params_of(rows: int) -> RowParams:
    nothing = np.zeros(0, np.int32)
    sampling = SamplingParams(temperature=0.8, top_k=50, top_p=0.9)
    states = [RowState(row, sampling, row, 1, nothing, nothing, nothing) for row in range(rows)]
    return split_row_params(jnp.asarray(np.stack([row_params_from_state(state) for state in states])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((arguments.rows, arguments.vocab_size)) * 3, jnp.float32)
    operands = (logits, params_of(arguments.rows), jnp.arange(arguments.rows))
    variants: dict[str, Callable[..., jax.Array]] = {
        **{mode.name.lower(): jax.jit(functools.partial(sampler.sample, mode=mode)) for mode in MODES},
        "sort": jax.jit(draw_with_a_sort),
    }
    best_s = dict.fromkeys(variants, float("inf"))
    for name in variants:
        variants[name](*operands).block_until_ready()
    for _ in range(arguments.rounds):
        for name, run in variants.items():
            started_s = time.perf_counter()
            run(*operands).block_until_ready()
            best_s[name] = min(best_s[name], time.perf_counter() - started_s)
    print(f"{arguments.rows} rows, vocabulary of {arguments.vocab_size}, on {jax.devices()[0].device_kind}")
    for name, seconds in best_s.items():
        print(f"{name:<10}{seconds * 1e3:9.2f} ms")
    extra = best_s["sort"] - best_s["draw"], best_s["limited"] - best_s["draw"]
    print(f"top_k and top_p beside the draw: {extra[0] * 1e3:.2f} ms with a sort, {extra[1] * 1e3:.2f} ms without")


if __name__ == "__main__":
    main()
