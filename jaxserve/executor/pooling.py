"""Vectors of texts, from the hidden states that steps leave behind (ForwardState.hidden): embeddings, and scores of labels.

As `scoring`, programs of their own do it, for some texts at a time, where somebody asked. A text may come in parts, over
several steps; what was found of it so far is kept for its request row. Sums are float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.executor.distributed import read
from jaxserve.executor.scoring import of_all_shards
from jaxserve.models import DATA_AXIS, Decoder, ModelConfig, ParamTree
from jaxserve.runner import PoolQuery

# Lines of one call: texts, or tokens where each has a vector of its own.
LINE_COUNTS = (8, 128)
TOKEN_LINE_COUNTS = (8, 1024)

LINE_FIELDS = 4  # row, first slot, tokens, position of the first


@dataclasses.dataclass(frozen=True)
class PoolingKey:
    """What a pooling program is compiled for. No tuple: one of the same lines would be a ScoringKey's equal."""

    num_lines: int

    @property
    def name(self) -> str:
        return f"pool {self.num_lines}"


class PooledLines(NamedTuple):
    """What a program gives."""

    sums: jax.Array | None  # float32 [rows, kinds * hidden size]: of each request row what was found so far; see `keeps_sums`
    vectors: jax.Array  # float32 [L, size]


def line_counts(config: ModelConfig) -> tuple[int, ...]:
    return TOKEN_LINE_COUNTS if config.pooling.of_tokens else LINE_COUNTS


def keeps_sums(config: ModelConfig) -> bool:
    """Texts may come in parts, all of which matter."""
    return config.is_causal and config.pooling.needs_whole and not config.pooling.of_tokens


class _Lines(NamedTuple):
    """int32 [L] each."""

    rows: jax.Array
    first_slots: jax.Array  # among those of all shards
    counts: jax.Array  # 0: padding
    starts: jax.Array

    @property
    def last_slots(self) -> jax.Array:
        return self.first_slots + jnp.maximum(self.counts - 1, 0)


def pool_lines(
    decoder: Decoder, params: ParamTree, hidden: jax.Array, sums: jax.Array | None, packed: jax.Array
) -> PooledLines:
    """`hidden` [slots, E] of each shard, `packed` int32 [L, 4] of `pack_pooling`. Must run where the decoder must."""
    lines, kinds = _Lines(*jnp.split(packed, LINE_FIELDS, axis=1)), decoder.config.pooling.kinds
    lines = jax.tree.map(lambda field: field[:, 0], lines)
    with jax.named_scope("pool"):
        parts = [_part(kind, hidden, lines) for kind in kinds]
        if sums is not None:
            before = jnp.split(sums[lines.rows], len(kinds), axis=1)
            parts = [_joined(*of_kind, lines) for of_kind in zip(kinds, before, parts, strict=True)]
            sums = sums.at[jnp.where(lines.counts > 0, lines.rows, len(sums))].set(jnp.concatenate(parts, axis=1), mode="drop")
        found = [_finished(kind, part, lines.starts + lines.counts) for kind, part in zip(kinds, parts, strict=True)]
        return PooledLines(sums, decoder.pool_head(params, jnp.concatenate(found, axis=1)))


def _part(kind: str, hidden: jax.Array, lines: _Lines) -> jax.Array:
    """float32 [L, E]: of the lines' tokens alone."""
    if kind in ("last", "tokens"):
        return of_all_shards(hidden, lines.last_slots).astype(jnp.float32)
    if kind == "cls":
        return of_all_shards(hidden, lines.first_slots).astype(jnp.float32)
    slots = jnp.arange(len(hidden), dtype=jnp.int32)
    if jax.lax.axis_size(DATA_AXIS) > 1:
        slots += jax.lax.axis_index(DATA_AXIS) * len(hidden)
    place = slots - lines.first_slots[:, None]  # [L, slots]
    is_of_line = (place >= 0) & (place < lines.counts[:, None])
    # States that are no numbers must show, and must not come into what is made of another text's, be it by a factor of 0.
    states = hidden.astype(jnp.float32)
    is_number = jnp.isfinite(states)
    states = jnp.where(is_number, states, 0)
    is_broken = (is_of_line & ~is_number.all(axis=1)).any(axis=1)
    if kind == "max":
        line_of_slot = jnp.where(is_of_line.any(axis=0), jnp.argmax(is_of_line, axis=0), len(is_of_line))
        found = jax.lax.pmax(jax.ops.segment_max(states, line_of_slot, len(is_of_line) + 1)[:-1], DATA_AXIS)
    else:
        weights = is_of_line.astype(jnp.float32)
        if kind == "weighted_mean":
            weights *= lines.starts[:, None] + place + 1
        found = jax.lax.psum(jnp.dot(weights, states, precision=jax.lax.Precision.HIGHEST), DATA_AXIS)
    is_broken = jax.lax.pmax(is_broken, DATA_AXIS)
    return jnp.where(is_broken[:, None], jnp.nan, found)


def _joined(kind: str, before: jax.Array, part: jax.Array, lines: _Lines) -> jax.Array:
    """With what was found in the text's earlier parts."""
    begins = (lines.starts == 0)[:, None]
    match kind:
        case "last":
            return part
        case "cls":
            return jnp.where(begins, part, before)
        case "max":
            return jnp.where(begins, part, jnp.maximum(before, part))
    return jnp.where(begins, part, before + part)


def _finished(kind: str, found: jax.Array, lengths: jax.Array) -> jax.Array:
    """float32 [L, E], of whole texts of these lengths."""
    count = jnp.maximum(lengths, 1).astype(jnp.float32)[:, None]
    match kind:
        case "mean":
            return found / count
        case "mean_sqrt_len":
            return found / jnp.sqrt(count)
        case "weighted_mean":
            return found / (count * (count + 1) / 2)
    return found


def pack_pooling(query: PoolQuery, num_lines: int, *, of_tokens: bool) -> Iterator[np.ndarray]:
    """What to call a program of so many lines with, one call after the other. `query`: with rows and slots as the device counts
    them."""
    if of_tokens:
        slots = np.concatenate(
            [np.arange(first, first + count) for first, count in zip(query.first_slots, query.counts, strict=True)]
        )
        lines = np.stack([np.zeros_like(slots), slots, np.ones_like(slots), np.zeros_like(slots)], axis=1)
    else:
        lines = np.stack([query.rows, query.first_slots, query.counts, query.starts], axis=1)
    for first in range(0, len(lines), num_lines):
        packed = np.zeros((num_lines, LINE_FIELDS), np.int32)
        part = lines[first : first + num_lines]
        packed[: len(part)] = part
        yield packed


def num_pooled(query: PoolQuery, *, of_tokens: bool) -> int:
    """Lines that `pack_pooling` makes."""
    return int(query.counts.sum()) if of_tokens else len(query.rows)


def unpack_pooled(query: PoolQuery, answers: list[jax.Array], *, of_tokens: bool) -> np.ndarray:
    """Waits for the answers to `pack_pooling`; see StepOutput.pooled."""
    vectors = np.concatenate([read(part) for part in answers])[: num_pooled(query, of_tokens=of_tokens)]
    return vectors if of_tokens else vectors[query.ends]


def padding_query(row: int) -> PoolQuery:
    """Of nothing, for a program's first run."""
    nothing = np.zeros(1, np.int32)
    return PoolQuery(np.full(1, row, np.int32), nothing, nothing, nothing, np.zeros(1, bool))
