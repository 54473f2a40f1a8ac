"""The pages of all shards as one row of pools, for a fake device that keeps them in one array."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.runner import PageUpdates, RunnerSpec


def numbered_through(updates: PageUpdates, spec: RunnerSpec) -> PageUpdates:
    """Pages and snapshots of a row's shard stand behind those of the shards before it, so that no row can mean another's."""
    sizes = np.array([*(group.num_pages for group in spec.kv_groups), spec.num_snapshots], np.int32)[updates.groups]
    assert (updates.pages < sizes).all(), f"pages {updates.pages.tolist()} of shards with {sizes.tolist()}"
    shards = updates.rows // spec.rows_per_shard
    return dataclasses.replace(updates, pages=np.where(updates.pages < 0, updates.pages, updates.pages + shards * sizes))
