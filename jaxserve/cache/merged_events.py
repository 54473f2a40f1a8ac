"""MergedEvents: one stream of KV cache events for trees that know nothing of each other, as the shards' are.

Who reads it asks whether the server has a block: it is stored when the first tree has it, and removed when the last one loses
it. In each tree a block stands behind its parent, so that a parent is always told of before its children.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from jaxserve.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent


class MergedEvents:
    def __init__(self) -> None:
        self._holders: defaultdict[int, int] = defaultdict(int)  # by the block's hash: one bit for each tree that has it

    def merge(self, of_trees: Sequence[Sequence[KVCacheEvent]]) -> list[KVCacheEvent]:
        """What each of the trees told since the last call. All of them are cleared at once, or none."""
        merged: list[KVCacheEvent] = []
        are_cleared = [any(isinstance(event, AllBlocksCleared) for event in events) for events in of_trees]
        if any(are_cleared):
            assert all(are_cleared), f"only some trees were cleared: {are_cleared}"
            self._holders.clear()
            merged.append(AllBlocksCleared())
        for tree, events in enumerate(of_trees):
            for event in events:
                if isinstance(event, BlockStored):
                    merged += self._stored(event, 1 << tree)
                elif isinstance(event, BlockRemoved):
                    merged += self._removed(event, 1 << tree)
        return merged

    def _stored(self, event: BlockStored, holder: int) -> list[KVCacheEvent]:
        """Those of its blocks that no other tree has, in runs of neighbours."""
        hashes = event.block_hashes
        is_new = [not self._holders[block] for block in hashes]
        for block in hashes:
            self._holders[block] |= holder
        if all(is_new):
            return [event]
        starts = [at for at, new in enumerate(is_new) if new and not (at and is_new[at - 1])]
        ends = [at + 1 for at, new in enumerate(is_new) if new and not all(is_new[at : at + 2])]
        ends += [len(hashes)] if is_new[-1] else []
        return [_part(event, start, end) for start, end in zip(starts, ends, strict=True)]

    def _removed(self, event: BlockRemoved, holder: int) -> list[KVCacheEvent]:
        """Those of its blocks that no other tree has."""
        gone = []
        for block in event.block_hashes:
            self._holders[block] &= ~holder
            if not self._holders[block]:
                del self._holders[block]
                gone.append(block)
        return [msgspec.structs.replace(event, block_hashes=gone)] if gone else []


def _part(event: BlockStored, start: int, end: int) -> BlockStored:
    size = event.block_size
    return msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[start:end],
        parent_block_hash=event.block_hashes[start - 1] if start else event.parent_block_hash,
        token_ids=event.token_ids[start * size : end * size],
    )
