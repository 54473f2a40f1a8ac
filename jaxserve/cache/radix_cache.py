"""RadixCache: a tree of token prefixes whose KV is in the pool, shared between requests page by page.

A path from a namespace's root spells a prefix; each node holds a run of whole pages. Namespaces (extra_key) are separate
trees under one top node. It knows tokens, pages, locks and recency, but not which pages are free nor any request:
`jaxserve.cache.manager` moves pages in (insert) and out (evict) and tells the allocator.

Everything below a locked node may still be evicted; a locked node and all above it may not. A discarded node is cut off from
its parent, so that nothing finds it, but keeps its way up: who locked it holds the path above as before. No function
here recurses and none loops over tokens: work is per node on the path, so that an 8k-token prompt costs microseconds.

Layers with a window have pages of their own for the same tokens, and those come and go more freely: of a path only the pages
that the next token's windows reach into are needed, so a prefix counts as cached up to the last place where they are there.
They are evicted by themselves, and locks do not keep them: who reads them holds them (`window_group`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.cache.events import EventRecorder, divide
from jaxserve.cache.eviction import EvictionQueue, is_evictable_leaf
from jaxserve.cache.page_allocator import NO_PAGE
from jaxserve.cache.run_pages import NO_PAGES, PageCollector, RunPages, concatenate, present
from jaxserve.cache.tree_node import TreeNode
from jaxserve.cache.walk import Walk
from jaxserve.cache.window_prefix import usable_pages

TOKEN_BYTES = 4
# Evicting one page of a long leaf gives up at least this share of it, from its end. The front, which most requests share,
# survives longest, and the copies that shorten a leaf stay proportional to what is evicted.
EVICT_SHARE = 4


class PrefixMatch(NamedTuple):
    length_tokens: int  # whole pages
    node: TreeNode  # the deepest node of the match; only its front may have matched


class LockedPrefix(NamedTuple):
    node: TreeNode  # ends exactly where the match ends; locked once for the caller
    pages: RunPages  # of the whole prefix
    num_known: int  # pages whose tokens are in the tree; more than are there to go on behind where windows' are gone


class InsertResult(NamedTuple):
    node: TreeNode  # ends exactly where the inserted tokens end
    existing: RunPages  # the tree's pages for the front part that it held already
    taken_windows: tuple[np.ndarray, ...]  # of the inserted ones those that the tree had no page for: they are its own now


class RadixCache:
    def __init__(
        self,
        page_size: int,
        eviction_policy: str = "lru",
        windows: Sequence[int] = (),
        events: EventRecorder | None = None,
    ) -> None:
        """`windows`: of the KV groups that have one, in tokens. `events` is told what can be found and what no longer."""
        assert page_size >= 1, f"page_size must be at least 1, got {page_size}"
        self.page_size = page_size
        self._events = events
        self._page_bytes = page_size * TOKEN_BYTES
        self._pages_seen = tuple(-(-(window - 1) // page_size) for window in windows)  # by a token that begins a page
        # At a node's end these are worth more than others: who goes on there sees them. One more, as the same prompt once again
        # goes on before its last token, which may be a page of its own.
        self._pages_kept = tuple(seen + 1 for seen in self._pages_seen)
        self._leaves = EvictionQueue(eviction_policy)
        self._window_queues = [  # first of nodes with pages that few will miss, then of all
            (
                EvictionQueue(eviction_policy, functools.partial(_has_window_pages, group=group, kept=kept)),
                EvictionQueue(eviction_policy, functools.partial(_has_window_pages, group=group)),
            )
            for group, kept in enumerate(self._pages_kept)
        ]
        self._ids = itertools.count()
        self._ticks = itertools.count(1)  # time for recency: one tick per operation, so no two leaves tie
        self.reset()

    def reset(self) -> None:
        """Forgets everything; the caller takes care of the pages."""
        self._clear_queues()
        self.top = self._new_node(None, None, b"", self._no_pages)
        self.evictable_pages = 0
        self.protected_pages = 0
        if self._events is not None:
            self._events.cleared()

    @property
    def num_cached_pages(self) -> int:
        return self.evictable_pages + self.protected_pages

    @property
    def num_windows(self) -> int:
        return len(self._pages_seen)

    def match(self, token_ids: np.ndarray, extra_key: str | None) -> PrefixMatch:
        """The longest cached prefix, for planning. Counts as a use for recency; changes nothing else."""
        root = self.top.children.get(extra_key)
        if root is None:
            return PrefixMatch(0, self.top)
        walk = self._usable(self._walk(root, self._page_aligned_bytes(token_ids)))
        self._touch(walk.path)
        return PrefixMatch(walk.num_bytes // TOKEN_BYTES, walk.path[-1] if walk.path else root)

    def acquire(self, token_ids: np.ndarray, extra_key: str | None, priority: int) -> LockedPrefix:
        """Matches, splits the last node where the match ends, and locks the path."""
        root = self.top.children.get(extra_key)
        if root is None:
            root = self.top.children[extra_key] = self._new_node(self.top, extra_key, b"", self._no_pages)
        whole = self._walk(root, self._page_aligned_bytes(token_ids))
        walk = self._usable(whole)
        self._end_at_node(walk)
        self._touch(walk.path)
        for node in walk.path:
            node.hits += 1
            node.priority = max(node.priority, priority)
        node = walk.path[-1] if walk.path else root
        self.lock(node)
        return LockedPrefix(node, self._pages_of(walk.path), whole.num_bytes // self._page_bytes)

    def insert(self, start: TreeNode, token_ids: np.ndarray, own: RunPages, priority: int) -> InsertResult:
        """Adds whole pages of tokens below `start`, a locked node. What the tree has already keeps its pages: the caller still
        owns its own pages for that part (the first of them), the others are the tree's now. Where windows' pages of that part
        are gone, the caller's take their place."""
        data = self._page_aligned_bytes(token_ids)
        pages = own.pages
        assert len(data) == len(pages) * self._page_bytes, f"{len(token_ids)} tokens for {len(pages)} pages of {self.page_size}"
        if start.discarded:  # nobody finds what is added here
            own = RunPages(pages, tuple(np.full_like(window, NO_PAGE) for window in own.windows))
        walk = self._walk(start, data)
        self._end_at_node(walk)
        self._touch(walk.path)
        for node in walk.path:
            node.priority = max(node.priority, priority)
        node = walk.path[-1] if walk.path else start
        existing = self._pages_of(walk.path)
        taken = self._fill_gaps(walk.path, own.windows)
        if walk.num_bytes < len(data):
            rest = own.part(slice(len(existing.pages), None))
            node = self._add_leaf(node, data[walk.num_bytes :], rest, priority)
            for group, window in enumerate(rest.windows):
                taken[group].append(present(window))
        return InsertResult(node, existing, tuple(map(concatenate, taken)))

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

    def unlock(self, node: TreeNode) -> RunPages:
        """Gives up one lock on the node and on all above it. A prefix is as recent as its last user's end. Returns the pages
        that the tree gives up with that: of discarded nodes that nobody holds any more, and of others that became useless."""
        tick = next(self._ticks)
        gone = self._collector()
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
                    gone.add(current.pages)
                else:
                    self.evictable_pages += len(current.pages)
                    self._settle(current, gone)
            current = parent
        return gone.result()

    def discard(self, node: TreeNode) -> RunPages:
        """Puts the node and all below it out of reach. What nobody has locked goes at once, and its pages are the caller's;
        the rest goes when its last lock does. Windows' pages go at once, as locks do not keep them."""
        gone = self._collector()
        if node.discarded:
            return gone.result()
        assert node.parent is not None and node.parent is not self.top, f"{node!r} is no prefix"
        _cut_off(node)
        stack = [node]
        while stack:
            current = stack.pop()
            stack.extend(current.children.values())
            current.discarded = True
            self._record_removal(current)
            gone.take_windows(current)
            if current.lock_count == 0:
                self.evictable_pages -= len(current.pages)
                _cut_off(current)
                gone.add(current.pages)
        self._settle(node.parent, gone)
        return gone.result()

    def evict(self, num_pages: int) -> RunPages:
        """Drops unlocked leaves, in the policy's order, until `num_pages` pages or all that may go are out; returns those
        pages. At least a quarter of a leaf goes at a time, so there may be more than asked."""
        gone = self._collector()
        while gone.num_pages < num_pages and (leaf := self._leaves.pop()) is not None:
            self._drop_tail(leaf, max(num_pages - gone.num_pages, len(leaf.pages) // EVICT_SHARE), gone)
        return gone.result()

    def evict_window(self, group: int, num_pages: int, is_held: Callable[[np.ndarray], np.ndarray]) -> RunPages:
        """Drops pages of one KV group with a window that are not held (int32 [n] -> bool [n]) until `num_pages` or all are out;
        returns those, and what became useless with them. Nodes go in the policy's order, but no page that who goes on behind a
        node needs goes before all the others are out."""
        gone = self._collector()
        passed: list[TreeNode] = []
        missing = num_pages
        for queue, kept in zip(self._window_queues[group], (self._pages_kept[group], 0), strict=True):
            while missing > 0 and (node := queue.pop()) is not None:
                window = node.windows[group]
                there = np.flatnonzero(_without_last(window, kept) != NO_PAGE)
                index = there[~is_held(window[there])][:missing]
                gone.add_window(group, window[index])
                window[index] = NO_PAGE
                missing -= len(index)
                passed.append(node)
                self._settle(node, gone)
        for node in passed:
            self._offer_windows(node)
        return gone.result()

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the top, parents before children."""
        return itertools.chain.from_iterable(map(_subtree, self.top.children.values()))

    def rebuild(self, bad: RunPages) -> None:
        """Removes every prefix that runs through one of the bad pages, bad windows' pages, and all locks; counts again from
        the nodes. What was removed is nobody's."""
        stack = [self.top]
        while stack:
            node = stack.pop()
            for child in list(node.children.values()):
                if np.isin(child.pages, bad.pages).any():
                    del node.children[child.edge]
                    for gone in _subtree(child):
                        self._record_removal(gone)
                else:
                    stack.append(child)
        self._clear_queues()
        self.top.lock_count = 0
        self.protected_pages = 0
        nodes = list(self.nodes())
        self.evictable_pages = sum(len(node.pages) for node in nodes)
        for node in nodes:
            node.lock_count = 0
            for window, bad_pages in zip(node.windows, bad.windows, strict=True):
                window[np.isin(window, bad_pages)] = NO_PAGE
        for node in nodes:
            self._offer_windows(node)
            self._settle(node, self._collector())

    # --- windows

    @property
    def _window_groups(self) -> range:
        return range(self.num_windows)

    def _usable(self, walk: Walk) -> Walk:
        """The longest part of a walk behind which a sequence can go on: what its windows then reach into is there."""
        if not self._pages_seen or not walk.path:
            return walk
        num_pages = walk.num_bytes // self._page_bytes
        runs = (np.concatenate([node.windows[group] for node in walk.path]) for group in self._window_groups)
        usable = usable_pages([run[:num_pages] != NO_PAGE for run in runs], self._pages_seen)
        return walk if usable == num_pages else walk.cut(usable, self._page_bytes)

    def _pages_of(self, path: list[TreeNode]) -> RunPages:
        windows = tuple(concatenate([node.windows[group] for node in path]) for group in self._window_groups)
        return RunPages(concatenate([node.pages for node in path]), windows)

    def _fill_gaps(self, path: list[TreeNode], windows: tuple[np.ndarray, ...]) -> list[list[np.ndarray]]:
        """Puts pages of a run that begins with `path` where the nodes have none; per group the pages it took."""
        taken: list[list[np.ndarray]] = [[] for _ in windows]
        start = 0
        for node in path if windows else ():
            end = start + len(node.pages)
            for group, window in enumerate(windows):
                mine, held = window[start:end], node.windows[group]
                fills = (held == NO_PAGE) & (mine != NO_PAGE)
                held[fills] = mine[fills]
                taken[group].append(mine[fills])
            self._offer_windows(node)
            start = end
        return taken

    def _offer_windows(self, node: TreeNode) -> None:
        for group, (fronts, all_pages) in enumerate(self._window_queues):
            if _has_window_pages(node, group):
                all_pages.offer(node)
                if len(node.pages) > self._pages_kept[group]:
                    fronts.offer(node)

    def _clear_queues(self) -> None:
        for queue in itertools.chain([self._leaves], *self._window_queues):
            queue.clear()

    def _is_useless(self, leaf: TreeNode) -> bool:
        """Nothing can go on anywhere in it: it has no page left that some window needs."""
        seen = zip(leaf.windows, self._pages_seen, strict=True)
        return any(needed and (window == NO_PAGE).all() for window, needed in seen)

    # --- the tree's shape

    def _walk(self, start: TreeNode, data: bytes) -> Walk:
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
        return Walk(path, pos, last_pages)

    def _end_at_node(self, walk: Walk) -> None:
        """Splits the path's last node if the walk ended inside it."""
        if walk.path and walk.last_pages < len(walk.path[-1].pages):
            walk.path[-1] = self._split(walk.path[-1], walk.last_pages)

    def _split(self, node: TreeNode, num_pages: int) -> TreeNode:
        """Puts a new node with the first `num_pages` pages above `node`, which keeps the rest, its children and its identity:
        whoever locked it locked the path to its end. All locks of the lower part run through the upper, so it has as many."""
        assert node.parent is not None and 0 < num_pages < len(node.pages), f"{node!r} cannot be split at {num_pages}"
        cut = num_pages * self._page_bytes
        whole = RunPages(node.pages, node.windows)
        upper = self._new_node(node.parent, node.edge, node.key[:cut], whole.part(slice(num_pages)))
        upper.lock_count = node.lock_count
        upper.last_access, upper.created, upper.hits, upper.priority = node.last_access, node.created, node.hits, node.priority
        upper.discarded = node.discarded
        node.parent.children[node.edge] = upper
        node.key = node.key[cut:]
        node.pages, node.windows = whole.part(slice(num_pages, None))
        node.edge = node.key[: self._page_bytes]
        upper.digests, node.digests = divide(node.digests, num_pages)
        node.parent = upper
        upper.children[node.edge] = node
        self._offer_windows(upper)
        return upper

    def _add_leaf(self, parent: TreeNode, key: bytes, own: RunPages, priority: int) -> TreeNode:
        leaf = self._new_node(parent, key[: self._page_bytes], key, own)
        leaf.priority = priority
        leaf.discarded = parent.discarded
        parent.children[leaf.edge] = leaf
        self.evictable_pages += len(own.pages)
        if self._events is not None and not leaf.discarded:
            self._events.stored(leaf)
        self._offer_windows(leaf)
        self._leaves.offer(leaf)  # the caller locks it next; it is looked at again when it comes to the top
        return leaf

    def _drop_tail(self, leaf: TreeNode, num_pages: int, gone: PageCollector) -> None:
        """Takes the last `num_pages` pages off an unlocked leaf, or all of it."""
        keep = len(leaf.pages) - num_pages
        if keep <= 0:
            self._settle(self._remove(leaf, gone), gone)
            return
        self._record_removal(leaf, keep)
        whole = RunPages(leaf.pages, leaf.windows)
        gone.add_run(whole.part(slice(keep, None)))
        leaf.key = leaf.key[: keep * self._page_bytes]
        leaf.pages, leaf.windows = whole.part(slice(keep))
        leaf.digests, _ = divide(leaf.digests, keep)
        self.evictable_pages -= num_pages
        self._settle(leaf, gone)

    def _remove(self, leaf: TreeNode, gone: PageCollector) -> TreeNode:
        """Takes an unlocked leaf out of the tree, with its pages; returns its parent."""
        assert leaf.parent is not None, "the top node is no leaf"
        self._record_removal(leaf)
        gone.add_run(RunPages(leaf.pages, leaf.windows))
        self.evictable_pages -= len(leaf.pages)
        leaf.discarded = True  # a queue may still have it
        del leaf.parent.children[leaf.edge]
        return leaf.parent

    def _settle(self, node: TreeNode, gone: PageCollector) -> None:
        """Called when a node may have become an unlocked leaf: it can be evicted then. One that became useless goes at once,
        and so may those above it; an empty namespace is forgotten."""
        while node.parent is not None and is_evictable_leaf(node):
            if node.parent is self.top:
                del self.top.children[node.edge]
                return
            if not self._is_useless(node):
                self._leaves.offer(node)
                return
            node = self._remove(node, gone)

    def _record_removal(self, node: TreeNode, keep: int = 0) -> None:
        """Only the first `keep` pages of a node can still be found."""
        if self._events is not None:
            self._events.removed(node, keep)

    def _touch(self, path: list[TreeNode]) -> None:
        tick = next(self._ticks)
        for node in path:
            node.last_access = tick

    def _new_node(self, parent: TreeNode | None, edge: bytes | str | None, key: bytes, own: RunPages) -> TreeNode:
        return TreeNode(
            id=next(self._ids),
            parent=parent,
            edge=edge,
            key=key,
            pages=own.pages,
            windows=own.windows,
            tick=next(self._ticks),
        )

    @property
    def _no_pages(self) -> RunPages:
        return RunPages(NO_PAGES, tuple(np.zeros(0, np.int32) for _ in self._window_groups))

    def _collector(self) -> PageCollector:
        return PageCollector(len(self._window_groups))

    def _page_aligned_bytes(self, token_ids: np.ndarray) -> bytes:
        whole = len(token_ids) // self.page_size * self.page_size
        return np.asarray(token_ids[:whole], np.int32).tobytes()


def _subtree(node: TreeNode) -> Iterator[TreeNode]:
    """It and all below it, parents before children."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _has_window_pages(node: TreeNode, group: int, kept: int = 0) -> bool:
    """Whether any is there, the last `kept` of the node left out."""
    return not node.discarded and bool((_without_last(node.windows[group], kept) != NO_PAGE).any())


def _without_last(window: np.ndarray, count: int) -> np.ndarray:
    return window[: max(len(window) - count, 0)]


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
