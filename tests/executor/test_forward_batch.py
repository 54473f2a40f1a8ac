"""pack and unpack are inverses, and tokens land on their rows and positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.executor.buckets import Buckets, powers_up_to
from jaxserve.executor.deal import Shards
from jaxserve.executor.forward_batch import (
    HEADER_LEN,
    NO_ROW,
    NUM_DECODE_ROWS,
    NUM_ROWS,
    Bucket,
    ForwardBatch,
    place_tokens,
    unpack,
)
from jaxserve.executor.row_params import NUM_ROW_PARAMS
from jaxserve.runner import PageUpdates, StepInput
from jaxserve.types import ForwardMode

SCRATCH = 99
WHOLE = Shards(1, SCRATCH, tables_each=2, slots_each=64)


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def mixed_step() -> StepInput:
    """Two decode rows at lengths 5 and 9, then two extend rows: tokens 4..6 of one and 0..1 of another."""
    return StepInput(
        mode=ForwardMode.MIXED,
        rows=ints(3, 1, 7, 2),
        seq_lens=ints(5, 9, 7, 2),
        extend_lens=ints(1, 1, 3, 2),
        num_decode_rows=2,
        input_ids=ints(11, 12, 13, 21, 22),
        sample=np.asarray([True, True, False, True]),
        page_updates=PageUpdates(ints(7, 2), ints(1, 0), ints(40, 41), groups=ints(0, 1)),
        new_rows=[],
        needs_sampling=True,
        needs_adjusting=False,
        needs_logprobs=True,
        needs_top_logprobs=False,
    )


def unpacked(
    step: StepInput, bucket: Bucket, params: np.ndarray | None = None, shards: Shards = WHOLE, shard: int = 0
) -> ForwardBatch:
    """What one shard finds in the buffer."""
    if params is None:
        params = np.zeros((step.num_rows, NUM_ROW_PARAMS), np.int32)
    batches = unpack(jnp.asarray(shards.deal(step, bucket).pack(params)), bucket)
    found: ForwardBatch = jax.tree.map(lambda field: field[shard], batches)
    return found


def test_what_is_packed_is_what_is_unpacked() -> None:
    step = mixed_step()
    bucket = Bucket(num_tokens=16, num_rows=8, num_page_updates=5, decode_only=False)
    params = np.arange(4 * NUM_ROW_PARAMS, dtype=np.int32).reshape(4, NUM_ROW_PARAMS)
    batch = unpacked(step, bucket, params)
    assert batch.header.shape == (HEADER_LEN,)
    assert batch.header.tolist() == [4, 2]
    assert batch.header[NUM_ROWS] == 4
    assert batch.header[NUM_DECODE_ROWS] == 2
    assert batch.rows.tolist() == [3, 1, 7, 2] + [SCRATCH] * 4
    assert batch.seq_lens.tolist() == [5, 9, 7, 2, 0, 0, 0, 0]
    assert batch.sample.tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    np.testing.assert_array_equal(batch.row_params[:4], params)
    table_rows = [7, SCRATCH + 1 + 2, *[NO_ROW] * 3]
    assert batch.page_updates.tolist() == [table_rows, [1, 0, 0, 0, 0], [40, 41, 0, 0, 0]]
    assert batch.input_ids is not None
    assert batch.input_ids.tolist()[2:7] == [11, 12, 13, 21, 22]


def test_tokens_know_their_row_and_position() -> None:
    bucket = Bucket(num_tokens=16, num_rows=8, num_page_updates=5, decode_only=False)
    batch = unpacked(mixed_step(), bucket)
    placed = place_tokens(batch, bucket)
    assert placed.cu_q_lens.tolist() == [0, 1, 2, 5, 7, 7, 7, 7, 7]
    assert placed.is_live.tolist() == [True] * 7 + [False] * 9
    assert placed.row_index.tolist()[:7] == [0, 1, 2, 2, 2, 3, 3]
    assert placed.positions.tolist()[:7] == [4, 8, 4, 5, 6, 0, 1]
    assert not np.any(placed.positions[7:])


def test_decode_tokens_are_their_rows() -> None:
    step = mixed_step()
    decode = StepInput(
        mode=ForwardMode.DECODE,
        rows=step.rows[:2],
        seq_lens=step.seq_lens[:2],
        extend_lens=step.extend_lens[:2],
        num_decode_rows=2,
        input_ids=ints(),
        sample=step.sample[:2],
        page_updates=PageUpdates.of(ints(), ints(), ints()),
        new_rows=[],
        needs_sampling=False,
        needs_adjusting=False,
        needs_logprobs=False,
        needs_top_logprobs=False,
    )
    buckets = Buckets.build((16, 64), (1, 4), page_size=4)
    bucket = buckets.choose(decode, WHOLE)
    assert bucket == Bucket(4, 4, 4, decode_only=True)
    batch = unpacked(decode, bucket)
    placed = place_tokens(batch, bucket)
    assert batch.input_ids is None
    assert placed.is_live.tolist() == [True, True, False, False]
    assert placed.positions.tolist() == [4, 8, 0, 0]


def test_every_step_up_to_the_largest_finds_its_bucket() -> None:
    buckets = Buckets.build(powers_up_to(16, 4, 1000), powers_up_to(1, 4, 50), page_size=16)
    assert [(b.num_tokens, b.num_rows) for b in buckets.extend] == [
        (16, 8),
        (64, 8),
        (256, 8),
        (256, 50),
        (1000, 8),
        (1000, 50),
    ]
    assert [(b.num_tokens, b.num_rows) for b in Buckets.build((16,), (4, 50), page_size=1).extend] == [(16, 8), (16, 16)]
    assert [b.num_rows for b in buckets.decode] == [1, 4, 16, 50]
    twice = Buckets.build(powers_up_to(16, 4, 1000), powers_up_to(1, 4, 50), page_size=16, num_kv_groups=2)
    assert [b.num_page_updates for b in twice.all] == [2 * b.num_page_updates for b in buckets.all]
    assert len(set(buckets.all)) == len(buckets.all)
    assert buckets.choose(mixed_step(), WHOLE) == buckets.extend[0]
