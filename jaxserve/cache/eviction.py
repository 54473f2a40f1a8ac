"""Which cached prefix goes first: the eviction policies and the queue of leaves that may go.

Knows nodes but not the tree around them: `radix_cache` offers leaves and removes what it is told to.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxserve.cache.tree_node import TreeNode

EvictionKey = tuple[int, int]  # smallest first

# A node's key may only grow while the node lives: LeafQueue relies on it.
EVICTION_KEYS: Mapping[str, Callable[[TreeNode], EvictionKey]] = MappingProxyType(
    {
        "lru": lambda node: (node.last_access, 0),
        "lfu": lambda node: (node.hits, node.last_access),
        "fifo": lambda node: (node.created, 0),
        "priority": lambda node: (node.priority, node.last_access),
    }
)


def is_evictable_leaf(node: TreeNode) -> bool:
    return not node.children and node.lock_count == 0 and not node.discarded


class LeafQueue:
    """A heap of leaves by the key they had when they entered, O(log n) each way.

    Uses of a node do not touch the heap. An entry whose node has been used since is put back under its present key when it
    comes to the top; as keys only grow, no entry below it can be older than it claims. A node that got a lock or a child is
    dropped there and offered again when it is a free leaf again. So there is at most one entry for each node.
    """

    def __init__(self, policy: str) -> None:
        if policy not in EVICTION_KEYS:
            raise ValueError(f"radix_eviction_policy must be one of {', '.join(EVICTION_KEYS)}; got {policy!r}.")
        self.key = EVICTION_KEYS[policy]
        self._heap: list[tuple[EvictionKey, int, TreeNode]] = []

    def offer(self, node: TreeNode) -> None:
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (self.key(node), node.id, node))

    def pop(self) -> TreeNode | None:
        """The leaf to evict next, or None. It is no longer in the queue."""
        while self._heap:
            key, _, node = self._heap[0]
            if not is_evictable_leaf(node):
                heapq.heappop(self._heap)
                node.queued = False
                continue
            current = self.key(node)
            if current != key:
                heapq.heapreplace(self._heap, (current, node.id, node))
                continue
            heapq.heappop(self._heap)
            node.queued = False
            return node
        return None

    def clear(self) -> None:
        for _, _, node in self._heap:
            node.queued = False
        self._heap = []
