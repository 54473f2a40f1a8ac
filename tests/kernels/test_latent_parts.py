"""A step's parts: each token is absorbed once, or its row's keys are all there once, at their places."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import GARBAGE

from jaxserve.kernels.latent_parts import Division, Rows, Sizes, stacked
from jaxserve.kernels.spec import AttentionSpec, Chip, ProjectedHead

PAGE_SIZE, NUM_ROWS, NUM_TOKENS, MAX_PAGES = 4, 6, 64, 12
SIZES = Sizes(fewest_queries=5, absorbed_tokens=8, pages=6, expanded_parts=5)


@jax.jit
def parts_of(kv_lens: jax.Array, cu_q_lens: jax.Array, page_table: jax.Array) -> tuple[Any, ...]:
    rows = Rows.of(kv_lens, cu_q_lens, NUM_TOKENS, PAGE_SIZE, SIZES)
    num_absorbed, num_expanded = rows.num_absorbed(SIZES.absorbed_tokens), rows.num_expanded(SIZES.pages)
    absorbed = stacked(lambda i: rows.absorbed(i, SIZES.absorbed_tokens), num_absorbed, NUM_TOKENS // SIZES.absorbed_tokens)
    expanded = stacked(lambda i: rows.expanded(i, SIZES.pages, page_table), num_expanded, SIZES.expanded_parts)
    return rows, num_absorbed, absorbed, num_expanded, expanded


@pytest.mark.parametrize("seed", range(40))
def test_parts_cover_a_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    most = int(rng.choice([3, 8, 20]))
    q_lens = np.minimum(rng.integers(0, most + 1, NUM_ROWS), NUM_TOKENS // NUM_ROWS)
    kv_lens = np.where(q_lens > 0, np.minimum(q_lens + rng.integers(0, 30, NUM_ROWS), MAX_PAGES * PAGE_SIZE), 0)
    cu_q_lens = np.cumsum([0, *q_lens])
    table = rng.choice(GARBAGE, (NUM_ROWS, MAX_PAGES))
    pages = -(-kv_lens // PAGE_SIZE)
    for row, count in enumerate(pages):
        table[row, :count] = 100 * row + np.arange(count)
    arrays = (jnp.asarray(x, jnp.int32) for x in (kv_lens, cu_q_lens, table))
    rows, num_absorbed, absorbed, num_expanded, expanded = jax.tree.map(np.asarray, parts_of(*arrays))

    wanted = q_lens >= SIZES.fewest_queries
    has_room = np.cumsum(np.where(wanted, pages, 0)) <= SIZES.pages * SIZES.expanded_parts
    np.testing.assert_array_equal(rows.is_expanded, wanted & has_room)

    seen: list[tuple[int, int]] = []  # token, keys that it sees
    for tokens, lens, cu in zip(absorbed.tokens, absorbed.kv_lens, absorbed.cu_q_lens, strict=True):
        for row in range(NUM_ROWS):
            mine = tokens[cu[row] : cu[row + 1]]
            seen += [(int(token), int(lens[row]) - len(mine) + 1 + i) for i, token in enumerate(mine)]
        assert (tokens[cu[-1] :] == NUM_TOKENS).all() or not cu[-1]
    expected = [
        (int(cu_q_lens[row]) + i, int(kv_lens[row] - q_lens[row]) + i + 1)
        for row in np.flatnonzero(~rows.is_expanded)
        for i in range(q_lens[row])
    ]
    assert sorted(seen) == expected and num_absorbed == -(-len(expected) // SIZES.absorbed_tokens)

    found: dict[int, list[int]] = {row: [] for row in range(NUM_ROWS)}  # the page-table indices of a row's pages
    for part in range(num_expanded):
        lens, first, positions, ids = (
            x[part] for x in (expanded.kv_lens, expanded.first_pages, expanded.first_positions, expanded.pages)
        )
        for row in np.flatnonzero(lens):
            first_key = int(kv_lens[row] - q_lens[row] - positions[row])
            assert first_key == PAGE_SIZE * len(found[row]), "parts of a row follow each other"
            found[row] += (ids[first[row] : first[row] + -(-lens[row] // PAGE_SIZE)] - 100 * row).tolist()
            assert first_key + lens[row] == min(kv_lens[row], PAGE_SIZE * len(found[row]))
        assert (ids < 100 * NUM_ROWS).all() and (ids >= 0).all(), "no garbage of the page table is followed"
    assert found == {row: list(range(pages[row])) if rows.is_expanded[row] else [] for row in range(NUM_ROWS)}


def test_sizes_of_deepseek_v3() -> None:
    """On each of eight devices; and where no projection pays."""
    head = ProjectedHead(128, 64, 128)
    spec = AttentionSpec(Chip("tpu"), 16, 1, 576, "bfloat16", "bfloat16", page_size=64, latent_dim=512, projected=head)
    assert head.pays_from(512) == 171
    assert Division().sizes(spec, 8192, 256, 2048) == Sizes(171, 512, 144, 64)
    assert Division().sizes(spec, 256, 8, 64) == Sizes(171, 256, 5, 13)
    assert Division().sizes(spec, 128, 8, 64) is None
    assert Division(fewest_tokens=1024).sizes(spec, 512, 8, 64) is None
    assert ProjectedHead(64, 16, 64).pays_from(64) is None
