"""RadixCache: a tree of token prefixes whose KV is in the pool, shared between requests page by page.

A path from a namespace's root spells a prefix; each node holds a run of whole pages. Namespaces (extra_key) are separate
trees under one top node. It knows tokens, pages, locks and recency, but not which pages are free nor any request:
`jaxserve.cache.manager` moves pages in (insert) and out (evict) and tells the allocator.

Everything below a locked node may still be evicted; a locked node and all above it may not. A discarded node is cut off from
its parent, so that nothing finds it, but keeps its way up: who locked it holds the path above as before. No function
here recurses and none loops over tokens: work is per node on the path, so that an 8k-token prompt costs microseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxserve.cache.eviction import LeafQueue, is_evictable_leaf
from jaxserve.cache.tree_node import TreeNode

TOKEN_BYTES = 4
# Evicting one page of a long leaf gives up at least this share of it, from its end. The front, which most requests share,
# survives longest, and the copies that shorten a leaf stay proportional to what is evicted.
EVICT_SHARE = 4

NO_PAGES = np.zeros(0, np.int32)
NO_PAGES.flags.writeable = False


class PrefixMatch(NamedTuple):
    length_tokens: int  # whole pages
    node: TreeNode  # the deepest node of the match; only its front may have matched


class LockedPrefix(NamedTuple):
    node: TreeNode  # ends exactly where the match ends; locked once for the caller
    pages: np.ndarray  # int32, of the whole prefix


class InsertResult(NamedTuple):
    node: TreeNode  # ends exactly where the inserted tokens end
    existing_pages: np.ndarray  # int32: the tree's pages for the front part that it held already


class _Walk(NamedTuple):
    path: list[TreeNode]  # nodes entered, top down
    num_bytes: int  # matched in all
    last_pages: int  # matched in the last node of the path


class RadixCache:
    def __init__(self, page_size: int, eviction_policy: str = "lru") -> None:
        assert page_size >= 1, f"page_size must be at least 1, got {page_size}"
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._leaves = LeafQueue(eviction_policy)
        self._ids = itertools.count()
        self._ticks = itertools.count(1)  # time for recency: one tick per operation, so no two leaves tie
        self.reset()

    def reset(self) -> None:
        """Forgets everything; the caller takes care of the pages."""
        self._leaves.clear()
        self.top = self._new_node(None, None, b"", NO_PAGES)
        self.evictable_pages = 0
        self.protected_pages = 0

    @property
    def num_cached_pages(self) -> int:
        return self.evictable_pages + self.protected_pages

    def match(self, token_ids: np.ndarray, extra_key: str | None) -> PrefixMatch:
        """The longest cached prefix, for planning. Counts as a use for recency; changes nothing else."""
        root = self.top.children.get(extra_key)
        if root is None:
            return PrefixMatch(0, self.top)
        walk = self._walk(root, self._page_aligned_bytes(token_ids))
        self._touch(walk.path)
        return PrefixMatch(walk.num_bytes // TOKEN_BYTES, walk.path[-1] if walk.path else root)

    def acquire(self, token_ids: np.ndarray, extra_key: str | None, priority: int) -> LockedPrefix:
        """Matches, splits the last node where the match ends, and locks the path."""
        root = self.top.children.get(extra_key)
        if root is None:
            root = self.top.children[extra_key] = self._new_node(self.top, extra_key, b"", NO_PAGES)
        walk = self._walk(root, self._page_aligned_bytes(token_ids))
        self._end_at_node(walk)
        self._touch(walk.path)
        for node in walk.path:
            node.hits += 1
            node.priority = max(node.priority, priority)
        node = walk.path[-1] if walk.path else root
        self.lock(node)
        return LockedPrefix(node, _concatenate([n.pages for n in walk.path]))

    def insert(self, start: TreeNode, token_ids: np.ndarray, pages: np.ndarray, priority: int) -> InsertResult:
        """Adds whole pages of tokens below `start`, a locked node. What the tree has already keeps its pages: the caller still
        owns its own pages for that part (the first len(existing_pages)), the others are the tree's now."""
        data = self._page_aligned_bytes(token_ids)
        assert len(data) == len(pages) * self._page_bytes, f"{len(token_ids)} tokens for {len(pages)} pages of {self.page_size}"
        walk = self._walk(start, data)
        self._end_at_node(walk)
        self._touch(walk.path)
        for node in walk.path:
            node.priority = max(node.priority, priority)
        node = walk.path[-1] if walk.path else start
        existing_pages = _concatenate([n.pages for n in walk.path])
        if walk.num_bytes < len(data):
            node = self._add_leaf(node, data[walk.num_bytes :], pages[len(existing_pages) :].astype(np.int32), priority)
        return InsertResult(node, existing_pages)

    def lock(self, node: TreeNode, until: TreeNode | None = None) -> None:
        """Locks the node and all above it, up to and without `until` (which the caller holds already)."""
        current: TreeNode | None = node
        while current is not until:
            assert current is not None, "the node to stop at is not above the node to lock"
            if current.lock_count == 0:
                self.evictable_pages -= len(current.pages)
                self.protected_pages += len(current.pages)
            current.lock_count += 1
            current = current.parent

    def unlock(self, node: TreeNode) -> np.ndarray:
        """Gives up one lock on the node and on all above it. A prefix is as recent as its last user's end. Returns the pages
        of discarded nodes that nobody holds any more: they are the caller's."""
        tick = next(self._ticks)
        gone: list[np.ndarray] = []
        current: TreeNode | None = node
        while current is not None:
            parent = current.parent
            assert current.lock_count > 0, f"unlock of {current!r} which nobody locked"
            current.lock_count -= 1
            current.last_access = tick
            if current.lock_count == 0:
                self.protected_pages -= len(current.pages)
                if current.discarded:
                    _cut_off(current)
                    gone.append(current.pages)
                else:
                    self.evictable_pages += len(current.pages)
                    self._offer_if_free(current)
            current = parent
        return _concatenate(gone)

    def discard(self, node: TreeNode) -> np.ndarray:
        """Puts the node and all below it out of reach. What nobody has locked goes at once, and its pages are the caller's;
        the rest goes when its last lock does."""
        if node.discarded:
            return NO_PAGES
        assert node.parent is not None and node.parent is not self.top, f"{node!r} is no prefix"
        _cut_off(node)
        gone: list[np.ndarray] = []
        stack = [node]
        while stack:
            current = stack.pop()
            stack.extend(current.children.values())
            current.discarded = True
            if current.lock_count == 0:
                self.evictable_pages -= len(current.pages)
                _cut_off(current)
                gone.append(current.pages)
        self._offer_if_free(node.parent)
        return _concatenate(gone)

    def evict(self, num_pages: int) -> np.ndarray:
        """Drops unlocked leaves, in the policy's order, until `num_pages` pages or all that may go are out; returns those
        pages. At least a quarter of a leaf goes at a time, so there may be more than asked."""
        evicted: list[np.ndarray] = []
        missing = num_pages
        while missing > 0 and (leaf := self._leaves.pop()) is not None:
            pages = self._drop_tail(leaf, max(missing, len(leaf.pages) // EVICT_SHARE))
            missing -= len(pages)
            evicted.append(pages)
        return _concatenate(evicted)

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the top, parents before children."""
        stack = list(self.top.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def rebuild(self, bad_pages: np.ndarray) -> None:
        """Removes every prefix that runs through one of `bad_pages`, and all locks; counts again from the nodes."""
        stack = [self.top]
        while stack:
            node = stack.pop()
            for child in list(node.children.values()):
                if np.isin(child.pages, bad_pages).any():
                    del node.children[child.edge]
                else:
                    stack.append(child)
        self._leaves.clear()
        self.top.lock_count = 0
        self.protected_pages = 0
        self.evictable_pages = 0
        for node in list(self.nodes()):
            node.lock_count = 0
            self.evictable_pages += len(node.pages)
            self._offer_if_free(node)

    # --- the tree's shape

    def _walk(self, start: TreeNode, data: bytes) -> _Walk:
        """Follows whole pages of tokens below `start`."""
        page_bytes = self._page_bytes
        path: list[TreeNode] = []
        pos = 0
        last_pages = 0
        children = start.children
        while pos < len(data):
            child = children.get(data[pos : pos + page_bytes])
            if child is None:
                break
            path.append(child)
            if not data.startswith(child.key, pos):
                last_pages = _common_tokens(child.key, data, pos) // self.page_size
                pos += last_pages * page_bytes
                break
            last_pages = len(child.pages)
            pos += len(child.key)
            children = child.children
        return _Walk(path, pos, last_pages)

    def _end_at_node(self, walk: _Walk) -> None:
        """Splits the path's last node if the walk ended inside it."""
        if walk.path and walk.last_pages < len(walk.path[-1].pages):
            walk.path[-1] = self._split(walk.path[-1], walk.last_pages)

    def _split(self, node: TreeNode, num_pages: int) -> TreeNode:
        """Puts a new node with the first `num_pages` pages above `node`, which keeps the rest, its children and its identity:
        whoever locked it locked the path to its end. All locks of the lower part run through the upper, so it has as many."""
        assert node.parent is not None and 0 < num_pages < len(node.pages), f"{node!r} cannot be split at {num_pages}"
        cut = num_pages * self._page_bytes
        # Copies, not views: a view would keep the whole run in memory after the other part is gone.
        upper = self._new_node(node.parent, node.edge, node.key[:cut], node.pages[:num_pages].copy())
        upper.lock_count = node.lock_count
        upper.last_access, upper.created, upper.hits, upper.priority = node.last_access, node.created, node.hits, node.priority
        upper.discarded = node.discarded
        node.parent.children[node.edge] = upper
        node.key = node.key[cut:]
        node.pages = node.pages[num_pages:].copy()
        node.edge = node.key[: self._page_bytes]
        node.parent = upper
        upper.children[node.edge] = node
        return upper

    def _add_leaf(self, parent: TreeNode, key: bytes, pages: np.ndarray, priority: int) -> TreeNode:
        leaf = self._new_node(parent, key[: self._page_bytes], key, pages)
        leaf.priority = priority
        leaf.discarded = parent.discarded
        parent.children[leaf.edge] = leaf
        self.evictable_pages += len(pages)
        self._offer_if_free(leaf)
        return leaf

    def _drop_tail(self, leaf: TreeNode, num_pages: int) -> np.ndarray:
        """Takes the last `num_pages` pages off an unlocked leaf, or all of it; returns them."""
        keep = len(leaf.pages) - num_pages
        if keep > 0:
            dropped = leaf.pages[keep:]
            leaf.key = leaf.key[: keep * self._page_bytes]
            leaf.pages = leaf.pages[:keep].copy()
            self._offer_if_free(leaf)
        else:
            dropped = leaf.pages
            assert leaf.parent is not None, "the top node was in the eviction queue"
            del leaf.parent.children[leaf.edge]
            self._offer_if_free(leaf.parent)
        self.evictable_pages -= len(dropped)
        return dropped

    def _offer_if_free(self, node: TreeNode) -> None:
        """Called when a node may have become an unlocked leaf: it can be evicted, and an empty namespace is forgotten."""
        if node.parent is None or not is_evictable_leaf(node):
            return
        if node.parent is self.top:
            del self.top.children[node.edge]
        else:
            self._leaves.offer(node)

    def _touch(self, path: list[TreeNode]) -> None:
        tick = next(self._ticks)
        for node in path:
            node.last_access = tick

    def _new_node(self, parent: TreeNode | None, edge: bytes | str | None, key: bytes, pages: np.ndarray) -> TreeNode:
        return TreeNode(id=next(self._ids), parent=parent, edge=edge, key=key, pages=pages, tick=next(self._ticks))

    def _page_aligned_bytes(self, token_ids: np.ndarray) -> bytes:
        whole = len(token_ids) // self.page_size * self.page_size
        return np.asarray(token_ids[:whole], np.int32).tobytes()


def _cut_off(node: TreeNode) -> None:
    """Takes a node from its parent's children, if it is still among them."""
    assert node.parent is not None, "the top node has no parent"
    if node.parent.children.get(node.edge) is node:
        del node.parent.children[node.edge]


def _common_tokens(key: bytes, data: bytes, pos: int) -> int:
    """How many tokens of `key` agree with those of `data` from byte `pos` on."""
    count = min(len(key), len(data) - pos) // TOKEN_BYTES
    differs = np.frombuffer(key, np.int32, count) != np.frombuffer(data, np.int32, count, pos)
    first = int(differs.argmax())
    return first if differs[first] else count


def _concatenate(pages: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(pages) if pages else NO_PAGES
