"""The sampling parameters of a row, as the int32 words that travel with every step.

They live on the host in one table and are gathered for the rows of each step: ten words a row cost less than keeping a
device table in step with admissions. What is large or rare (penalty counts, biases, held-back stop tokens) stays on the
device instead, see `row_tables.py`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runner import RowState
from jaxserve.types import UNLIMITED_TOP_K

_FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_INTS = ("top_k", "seed_low", "seed_high", "min_seq_len", "num_bias")
# The most likely token of any vocabulary is likelier; smaller numbers would be lost in float32.
_LEAST_TOP_P = 1e-20
NUM_ROW_PARAMS = len(_FLOATS) + len(_INTS)
_TEMPERATURE, _TOP_P, _MIN_P, _TOP_K = ((*_FLOATS, *_INTS).index(name) for name in ("temperature", "top_p", "min_p", "top_k"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowParams:
    """Per row of a step: float32 [R] the first six, int32 [R] the others."""

    temperature: jax.Array  # 0: greedy
    top_p: jax.Array
    min_p: jax.Array
    frequency_penalty: jax.Array
    presence_penalty: jax.Array
    repetition_penalty: jax.Array
    top_k: jax.Array  # UNLIMITED_TOP_K: all tokens
    seed_low: jax.Array
    seed_high: jax.Array
    min_seq_len: jax.Array  # stop tokens are held back while the sequence is shorter; 0: never
    num_bias: jax.Array  # valid entries in the row's bias table


def row_params_from_state(state: RowState) -> np.ndarray:
    """int32 [NUM_ROW_PARAMS] for a newly admitted row."""
    sampling = state.sampling
    floats = (
        0.0 if sampling.is_greedy else sampling.temperature,
        max(sampling.top_p, _LEAST_TOP_P),
        sampling.min_p,
        sampling.frequency_penalty,
        sampling.presence_penalty,
        sampling.repetition_penalty,
    )
    seed = state.seed & (2**64 - 1)
    ints = (
        UNLIMITED_TOP_K if sampling.top_k == -1 else min(sampling.top_k, UNLIMITED_TOP_K),
        seed & 0xFFFFFFFF,
        seed >> 32,
        state.prompt_len + sampling.min_new_tokens if sampling.min_new_tokens else 0,
        len(sampling.logit_bias),
    )
    return np.concatenate([np.asarray(floats, np.float32).view(np.int32), np.asarray(ints, np.uint32).view(np.int32)])


def has_limits(packed: np.ndarray) -> bool:
    """Whether some row of int32 [R, NUM_ROW_PARAMS] draws with top_k, top_p or min_p."""
    floats = packed.view(np.float32)
    limited = (packed[:, _TOP_K] < UNLIMITED_TOP_K) | (floats[:, _TOP_P] < 1) | (floats[:, _MIN_P] > 0)
    return bool(np.any(limited & (floats[:, _TEMPERATURE] > 0)))


def split_row_params(packed: jax.Array) -> RowParams:
    """int32 [R, NUM_ROW_PARAMS] -> RowParams, traced inside the step."""
    columns = [packed[:, i] for i in range(NUM_ROW_PARAMS)]
    floats = [jax.lax.bitcast_convert_type(column, jnp.float32) for column in columns[: len(_FLOATS)]]
    return RowParams(*floats, *columns[len(_FLOATS) :])
