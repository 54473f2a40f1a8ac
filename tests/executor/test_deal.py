"""A step dealt out to shards: what each finds in the buffer, and which results are whose."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.executor.buckets import Buckets
from jaxserve.executor.deal import Shards
from jaxserve.executor.forward_batch import NO_ROW, Bucket, place_tokens, unpack
from jaxserve.executor.row_params import NUM_ROW_PARAMS
from jaxserve.runner import PageUpdates, StepInput
from jaxserve.types import ForwardMode

SHARDS = Shards(count=4, rows_each=3, tables_each=2, slots_each=64)
BUCKETS = Buckets.build((16, 64), (4, 12), page_size=4, num_shards=4)


def random_step(rng: np.random.Generator, num_decode: int, num_extend: int, most: int) -> StepInput:
    rows = rng.permutation(12)[: num_decode + num_extend].astype(np.int32)
    lens = np.concatenate([np.ones(num_decode), rng.integers(1, most + 1, num_extend)]).astype(np.int32)
    count = int(rng.integers(0, 9))
    updates = PageUpdates(*(rng.integers(0, high, count).astype(np.int32) for high in (12, 5, 100, 2)))
    return StepInput(
        mode=ForwardMode.MIXED if num_extend else ForwardMode.DECODE,
        rows=rows,
        seq_lens=lens + rng.integers(0, 50, len(rows)).astype(np.int32),
        extend_lens=lens,
        num_decode_rows=num_decode,
        input_ids=rng.integers(0, 1000, lens[num_decode:].sum()).astype(np.int32),
        sample=rng.random(len(rows)) < 0.5,
        page_updates=updates,
        new_rows=[],
        needs_sampling=False,
        needs_adjusting=False,
        needs_logprobs=False,
        needs_top_logprobs=False,
    )


def slots_of(step: StepInput, row: int) -> np.ndarray:
    """Of the step's tokens those of its `row`-th row."""
    ends = np.cumsum(step.extend_lens)
    return np.arange(ends[row] - step.extend_lens[row], ends[row])


@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_in_its_shard(seed: int) -> None:
    rng = np.random.default_rng(seed)
    step = random_step(rng, *[(3, 4, 9), (0, 1, 40), (6, 0, 1), (0, 5, 3)][seed % 4])
    bucket = BUCKETS.choose(step, SHARDS)
    deal, params = SHARDS.deal(step, bucket), rng.integers(0, 99, (step.num_rows, NUM_ROW_PARAMS)).astype(np.int32)
    batches = unpack(jnp.asarray(deal.pack(params)), bucket)
    tokens = np.concatenate([np.full(step.num_decode_rows, -1), step.input_ids])
    slots = deal.hidden_slots(np.arange(step.num_tokens, dtype=np.int32))
    assert len(set(deal.lines.tolist())) == step.num_rows
    for row, (number, line) in enumerate(zip(step.rows.tolist(), deal.lines.tolist(), strict=True)):
        shard, place = divmod(line, bucket.num_rows)
        batch = jax.tree.map(lambda field, shard=shard: field[shard], batches)
        assert (shard, int(batch.rows[place])) == divmod(number, SHARDS.rows_each)
        assert int(batch.seq_lens[place]) == step.seq_lens[row]
        assert bool(batch.sample[place]) == step.sample[row]
        np.testing.assert_array_equal(batch.row_params[place], params[row])
        placement = place_tokens(batch, bucket)
        own = np.flatnonzero(np.asarray(placement.is_live) & (np.asarray(placement.row_index) == place))
        assert len(own) == step.extend_lens[row]
        assert slots[slots_of(step, row)].tolist() == (shard * SHARDS.slots_each + own).tolist()
        if row >= step.num_decode_rows:
            assert batch.input_ids is not None
            assert batch.input_ids[own].tolist() == tokens[slots_of(step, row)].tolist()
    counts = np.bincount(step.rows // SHARDS.rows_each, minlength=4)
    assert batches.header[:, 0].tolist() == counts.tolist()
    assert (np.asarray(batches.rows) == SHARDS.padding_row).sum() == 4 * bucket.num_rows - step.num_rows


@pytest.mark.parametrize("seed", range(10))
def test_page_table_entries_go_to_their_shards_tables(seed: int) -> None:
    step = random_step(np.random.default_rng(seed), 4, 0, 1)
    updates, bucket = step.page_updates, Bucket(3, 3, 8, decode_only=True, num_shards=4)
    batches = unpack(jnp.asarray(SHARDS.deal(step, bucket).pack(np.zeros((4, NUM_ROW_PARAMS), np.int32))), bucket)
    entries = zip(updates.rows.tolist(), updates.index.tolist(), updates.pages.tolist(), updates.groups.tolist(), strict=True)
    wanted = sorted((row // 3, group * 4 + row % 3, index, page) for row, index, page, group in entries)
    packed = np.asarray(batches.page_updates)
    found = [(shard, *packed[shard, :, at].tolist()) for shard in range(4) for at in range(8) if packed[shard, 0, at] != NO_ROW]
    assert sorted(found) == wanted
    rows, index, pages = SHARDS.pack_page_updates(updates, 16)[:, : len(updates)].tolist()
    assert sorted((row // 8, row % 8, at, page) for row, at, page in zip(rows, index, pages, strict=True)) == wanted


def test_what_a_step_has_no_room_for_goes_ahead_of_it() -> None:
    rows = np.array([0, 1, 2, 0, 11, 1, 10], np.int32)
    updates = PageUpdates.of(rows, rows, rows)
    assert SHARDS.beyond(updates, 7) is None
    is_beyond = SHARDS.beyond(updates, 2)
    assert is_beyond is not None
    assert np.flatnonzero(is_beyond).tolist() == [2, 3, 5]
    assert SHARDS.beyond(PageUpdates.of(rows[3:], rows[3:], rows[3:]), 2) is None


def test_lines_of_logits() -> None:
    step = random_step(np.random.default_rng(0), 5, 0, 1)
    bucket = Bucket(6, 3, 3, decode_only=True, num_shards=4)  # two tokens of a row
    deal = SHARDS.deal(step, bucket)
    lines = deal.logit_lines(np.array([0, 1, 7], np.int32))
    assert lines.tolist() == [2 * deal.lines[0], 2 * deal.lines[0] + 1, 2 * deal.lines[3] + 1]


def test_tokens_of_one_shard_are_packed() -> None:
    rng = np.random.default_rng(0)
    spread, lonely = random_step(rng, 0, 6, 2), random_step(rng, 0, 1, 1)
    assert not BUCKETS.choose(spread, SHARDS).packs_tokens
    assert BUCKETS.choose(random_step(np.random.default_rng(3), 0, 1, 40), SHARDS).packs_tokens
    assert not BUCKETS.choose(lonely, SHARDS).packs_tokens
    assert BUCKETS.extend[-1] == Bucket(64, 3, 22, decode_only=False, num_shards=4, packs_tokens=True)
