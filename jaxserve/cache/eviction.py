"""Which cached prefix goes first: the eviction policies and the queue of nodes that may go.

Knows nodes but not the tree around them: `radix_cache` offers nodes and removes what it is told to.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxserve.cache.tree_node import TreeNode

EvictionKey = tuple[int, int]  # smallest first

# A node's key may only grow while the node lives: EvictionQueue relies on it.
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


class EvictionQueue:
    """A heap of nodes by the key they had when they entered, O(log n) each way.

    Uses of a node do not touch the heap. An entry whose node has been used since is put back under its present key when it
    comes to the top; as keys only grow, no entry below it can be older than it claims. A node that may not go any more is
    dropped there and offered again when it may. So there is at most one entry for each node.
    """

    def __init__(self, policy: str, may_go: Callable[[TreeNode], bool] = is_evictable_leaf) -> None:
        if policy not in EVICTION_KEYS:
            raise ValueError(f"radix_eviction_policy must be one of {', '.join(EVICTION_KEYS)}; got {policy!r}.")
        self.key = EVICTION_KEYS[policy]
        self._may_go = may_go
        self._heap: list[tuple[EvictionKey, int, TreeNode]] = []
        self._ids: set[int] = set()  # of the nodes in the heap

    def __contains__(self, node: TreeNode) -> bool:
        return node.id in self._ids

    def offer(self, node: TreeNode) -> None:
        if node.id not in self._ids:
            self._ids.add(node.id)
            heapq.heappush(self._heap, (self.key(node), node.id, node))

    def pop(self) -> TreeNode | None:
        """The node to evict next, or None. It is no longer in the queue."""
        while self._heap:
            key, _, node = self._heap[0]
            may_go, current = self._may_go(node), self.key(node)
            if may_go and current != key:
                heapq.heapreplace(self._heap, (current, node.id, node))
                continue
            heapq.heappop(self._heap)
            self._ids.remove(node.id)
            if may_go:
                return node
        return None

    def clear(self) -> None:
        self._heap = []
        self._ids.clear()
