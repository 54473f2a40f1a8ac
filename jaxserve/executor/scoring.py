"""What the model expects behind tokens of a step: logprobs of known next tokens, the likeliest ones, and ones asked for.

Sampling sees one distribution per row; a prompt has one per token. The forward half leaves the hidden states of a step's tokens
behind (ForwardState.hidden), and programs of their own turn a few lines of them at a time into logits, so that logits of whole
prompts never exist. They run between two forward passes, only where somebody asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.executor.distributed import read
from jaxserve.models import DATA_AXIS, Decoder, ParamTree, own_lines
from jaxserve.models.adapters.low_rank import LowRank
from jaxserve.runner import NO_TOKEN_ID, ScoreQuery, Scores

# Lines of one call. Each costs a line of logits; and on accelerators few lines read the output matrix as often as many.
LINE_COUNTS = (8, 128)
# Tokens asked for besides the next one, in one call.
IDS_PER_LINE = 32
# Lines of one call that only copies.
HIDDEN_LINES = 128


class ScoringKey(NamedTuple):
    """What a scoring program is compiled for."""

    num_lines: int

    @property
    def name(self) -> str:
        return f"score {self.num_lines}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoredLines:
    """Of L lines; all logprobs float32 and of the model's own distribution."""

    logprobs: jax.Array  # [L] of the next tokens
    top_ids: jax.Array  # int32 [L, M]
    top_logprobs: jax.Array  # [L, M], descending
    id_logprobs: jax.Array  # [L, IDS_PER_LINE]


class StepHidden(NamedTuple):
    """What a step leaves behind of its tokens, in each shard."""

    states: jax.Array  # [slots, E]
    adapter_slots: jax.Array | None  # int32 [slots], where adapters change the output head


def score_lines(
    decoder: Decoder, params: ParamTree, head: LowRank | None, hidden: StepHidden, packed: jax.Array, num_top: int
) -> ScoredLines:
    """`packed` int32 [L, 2 + IDS_PER_LINE]: slot among those of all shards, next token, tokens asked for. `head`: adapters of
    the output head, if there are any. Must run where the decoder must."""
    slots, wanted = packed[:, 0], jnp.maximum(packed[:, 1:], 0)
    with jax.named_scope("score"):
        of_lines = None if hidden.adapter_slots is None else of_all_shards(hidden.adapter_slots, slots)
        logits = decoder.logits(params, of_all_shards(hidden.states, slots), head, of_lines)
        normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        logprobs = jnp.take_along_axis(logits, wanted, axis=-1) - normalizer
        values, ids = jax.lax.top_k(logits, num_top)
    return ScoredLines(logprobs[:, 0], ids.astype(jnp.int32), values - normalizer, logprobs[:, 1:])


def copy_lines(hidden: jax.Array, slots: jax.Array) -> jax.Array:
    """float32 [L, E] of `hidden` [slots, E] of each shard."""
    return of_all_shards(hidden, slots).astype(jnp.float32)


def of_all_shards(hidden: jax.Array, slots: jax.Array) -> jax.Array:
    """[L, ...] of `hidden` [slots, ...] of each shard."""
    if jax.lax.axis_size(DATA_AXIS) == 1:
        return hidden[slots]
    return jax.lax.psum(hidden.at[own_lines(slots, len(hidden))].get(mode="fill", fill_value=0), DATA_AXIS)


def pack_query(query: ScoreQuery, num_lines: int) -> Iterator[np.ndarray]:
    """What to call a program of so many lines with, one call after the other; `unpack_scores` puts the answers together."""
    count, num_ids = query.token_ids.shape
    for first_line in range(0, count, num_lines):
        lines = slice(first_line, first_line + num_lines)
        for first_id in range(0, max(num_ids, 1), IDS_PER_LINE):
            ids = query.token_ids[lines, first_id : first_id + IDS_PER_LINE]
            packed = np.full((num_lines, 2 + IDS_PER_LINE), NO_TOKEN_ID, np.int32)
            packed[:, 0] = 0
            packed[: len(ids), 0], packed[: len(ids), 1] = query.slots[lines], query.targets[lines]
            packed[: len(ids), 2 : 2 + ids.shape[1]] = ids
            yield packed


def unpack_scores(query: ScoreQuery, answers: list[ScoredLines]) -> Scores:
    """Waits for the answers to `pack_query`, in its order."""
    count, num_ids = query.token_ids.shape
    per_line = max(-(-num_ids // IDS_PER_LINE), 1)
    firsts = answers[::per_line]
    id_logprobs = np.zeros((count, num_ids), np.float32)
    for part in range(per_line if num_ids else 0):
        columns = slice(part * IDS_PER_LINE, (part + 1) * IDS_PER_LINE)
        found = unpack_lines([answer.id_logprobs for answer in answers[part::per_line]], count)
        id_logprobs[:, columns] = found[:, : id_logprobs[:, columns].shape[1]]
    return Scores(
        logprobs=unpack_lines([answer.logprobs for answer in firsts], count),
        id_logprobs=id_logprobs,
        top_ids=unpack_lines([answer.top_ids for answer in firsts], count) if query.needs_top else None,
        top_logprobs=unpack_lines([answer.top_logprobs for answer in firsts], count) if query.needs_top else None,
    )


def pack_slots(slots: np.ndarray) -> Iterator[np.ndarray]:
    """What to call the copying program with."""
    for first in range(0, len(slots), HIDDEN_LINES):
        packed = np.zeros(HIDDEN_LINES, np.int32)
        part = slots[first : first + HIDDEN_LINES]
        packed[: len(part)] = part
        yield packed


def unpack_lines(answers: list[jax.Array], count: int) -> np.ndarray:
    """[count, ...]; waits for the answers, as to `pack_slots`."""
    return np.concatenate([read(answer) for answer in answers])[:count]
