"""What the device remembers of rows with penalties, logit_bias or min_new_tokens.

The tables are written once, when such a row is admitted (`write_row`); rows without those features never touch them and
may hold stale entries, which their parameters switch off (penalty 0, repetition 1, num_bias 0, min_seq_len 0).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.executor.row_params import RowParams
from jaxserve.runner import RowState
from jaxserve.types import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

MAX_HELD_BACK = MAX_STOP_TOKEN_IDS + 16  # the request's stop tokens and the model's eos tokens
HISTORY_CHUNK = 1024  # output tokens counted per call of write_row

_PACKED_LEN = 2 + MAX_HELD_BACK + 2 * MAX_LOGIT_BIAS + HISTORY_CHUNK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowTables:
    """One line per request row, plus the scratch row that padding rows use. V is the vocabulary."""

    output_counts: jax.Array  # int16 [rows, V] how often the row has generated each token
    held_back_ids: jax.Array  # int32 [rows, MAX_HELD_BACK] tokens min_new_tokens forbids; V where unused
    bias_ids: jax.Array  # int32 [rows, MAX_LOGIT_BIAS]
    bias_values: jax.Array  # float32 [rows, MAX_LOGIT_BIAS]

    @staticmethod
    def shapes(num_rows: int, vocab_size: int) -> RowTables:
        return RowTables(
            jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.int16),  # type: ignore[arg-type]
            jax.ShapeDtypeStruct((num_rows, MAX_HELD_BACK), jnp.int32),  # type: ignore[arg-type]
            jax.ShapeDtypeStruct((num_rows, MAX_LOGIT_BIAS), jnp.int32),  # type: ignore[arg-type]
            jax.ShapeDtypeStruct((num_rows, MAX_LOGIT_BIAS), jnp.float32),  # type: ignore[arg-type]
        )


def needs_tables(state: RowState) -> bool:
    sampling = state.sampling
    return sampling.has_penalties or bool(sampling.logit_bias) or sampling.min_new_tokens > 0


def pack_row(state: RowState, vocab_size: int) -> list[np.ndarray]:
    """The int32 buffers for `write_row`, one call each: more than one only for a long history after a retraction."""
    held_back = np.full(MAX_HELD_BACK, vocab_size, np.int32)
    ids = state.stop_token_ids[:MAX_HELD_BACK]
    held_back[: len(ids)] = ids
    bias_ids, bias_values = np.zeros(MAX_LOGIT_BIAS, np.int32), np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias = state.sampling.logit_bias
    bias_ids[: len(bias)], bias_values[: len(bias)] = list(bias.keys()), list(bias.values())

    buffers = []
    for start in range(0, max(len(state.output_ids), 1), HISTORY_CHUNK):
        history = np.full(HISTORY_CHUNK, vocab_size, np.int32)
        part = state.output_ids[start : start + HISTORY_CHUNK]
        history[: len(part)] = part
        head = np.asarray([state.row, start == 0], np.int32)
        buffers.append(np.concatenate([head, held_back, bias_ids, bias_values.view(np.int32), history]))
    return buffers


def packed_row_shape() -> tuple[int]:
    return (_PACKED_LEN,)


def write_row(tables: RowTables, packed: jax.Array) -> RowTables:
    """Sets one row of every table; jitted with the tables donated."""
    row, is_first = packed[0], packed[1]
    at = 2
    held_back, at = packed[at : at + MAX_HELD_BACK], at + MAX_HELD_BACK
    bias_ids, at = packed[at : at + MAX_LOGIT_BIAS], at + MAX_LOGIT_BIAS
    bias_values, at = jax.lax.bitcast_convert_type(packed[at : at + MAX_LOGIT_BIAS], jnp.float32), at + MAX_LOGIT_BIAS
    counts = jnp.where(is_first, jnp.int16(0), tables.output_counts[row])
    counts = counts.at[packed[at:]].add(jnp.int16(1), mode="drop")
    return RowTables(
        tables.output_counts.at[row].set(counts),
        tables.held_back_ids.at[row].set(held_back),
        tables.bias_ids.at[row].set(bias_ids),
        tables.bias_values.at[row].set(bias_values),
    )


def adjust_logits(
    logits: jax.Array,
    tables: RowTables,
    rows: jax.Array,
    seq_lens: jax.Array,
    params: RowParams,
    drafts: jax.Array | None = None,
) -> jax.Array:
    """Penalties, then held-back stop tokens, then biases: SGLang's order. float32 [R, V] -> float32 [R, V].

    `drafts` int32 [R, D] count as generated too; -1: none.
    """
    counts = tables.output_counts[rows].astype(jnp.float32)
    if drafts is not None:
        drafts = jnp.where(drafts < 0, logits.shape[1], drafts)
        counts = counts.at[jnp.arange(len(rows))[:, None], drafts].add(1, mode="drop")
    seen = counts > 0
    logits = logits - counts * params.frequency_penalty[:, None] - seen * params.presence_penalty[:, None]
    repetition = params.repetition_penalty[:, None]
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, scaled, logits)

    line = jnp.arange(len(rows))[:, None]
    too_short = seq_lens < params.min_seq_len
    held_back = jnp.where(too_short[:, None], tables.held_back_ids[rows], logits.shape[1])
    logits = logits.at[line, held_back].set(-jnp.inf, mode="drop")

    is_bias = jnp.arange(MAX_LOGIT_BIAS)[None, :] < params.num_bias[:, None]
    bias_ids = jnp.where(is_bias, tables.bias_ids[rows], logits.shape[1])
    return logits.at[line, bias_ids].add(tables.bias_values[rows], mode="drop")
