"""Which tokens of a step vectors are made of, and whose the vectors are.

A text's tokens come chunk by chunk, and what the device has made of them so far stays in its row. So all of a text is computed
where all of it is needed, whatever the prefix cache has, and anew after a retraction (`Req.recompute_from`). A PoolPlan is the
runner's query and, once it is answered, knows which line is whose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxserve.runner import PoolQuery, Vectors
from jaxserve.scheduler.prefill_item import PrefillItem
from jaxserve.scheduler.req import Req


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    items: list[PrefillItem]  # one for each part of the query
    query: PoolQuery
    of_tokens: bool  # each token has a vector

    def take_in(self, pooled: np.ndarray) -> list[Req]:
        """float32 [N, size] go to their requests. Returns those, not finished yet, of which some are not numbers."""
        counts = self.query.counts if self.of_tokens else self.query.ends.astype(np.int32)
        ends = np.cumsum(counts)
        assert len(pooled) == ends[-1], f"{len(pooled)} vectors instead of {ends[-1]}"
        is_good = np.isfinite(pooled).all(axis=1)
        all_good, broken = bool(is_good.all()), []
        parts = zip(self.items, self.query.starts.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
        for item, start, first, end in parts:
            req = item.req
            if first == end or req.is_finished:
                continue
            assert req.vectors is not None, f"nobody asked for vectors of {req.rid}"
            req.vectors.take_in(start, pooled[first:end])
            if not all_good and not is_good[first:end].all():
                broken.append(req)
        return broken


def plan_pooling(items: Sequence[PrefillItem], lens: np.ndarray, first_slot: int, vectors: Vectors) -> PoolPlan | None:
    """Of a step that computes these items, `lens` int32 tokens of each, whose slots begin at `first_slot`. None: nothing
    is to be made of them."""
    needs_whole = vectors.needs_whole
    places = [at for at, item in enumerate(items) if item.req.vectors is not None and (needs_whole or item.is_last)]
    if not places:
        return None
    asked = [items[at] for at in places]
    slot_ends = first_slot + np.cumsum(lens, dtype=np.int32)[places]
    counts = lens[places] if needs_whole else np.ones(len(places), np.int32)
    query = PoolQuery(
        rows=np.array([item.row for item in asked], np.int32),
        first_slots=slot_ends - counts,
        counts=counts,
        starts=np.array([item.end for item in asked], np.int32) - counts,
        ends=np.array([item.is_last for item in asked], bool),
    )
    return PoolPlan(asked, query, vectors.of_tokens)
