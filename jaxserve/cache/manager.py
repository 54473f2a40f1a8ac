"""CacheManager: the sole owner of page lifetime, and with it of request rows and of the radix tree.

The scheduler asks for a Lease per running request and names lengths and tokens; it never sees a free list or frees a page.

    admit -> Lease: a row, the cached prefix locked and in its page table
    grow / grow_rows: pages for more tokens, evicting unlocked prefixes if needed
    commit: whole pages so far go to the tree, for others to share     (any number of times)
    discard: what the request brought to the tree cannot be trusted; nobody is given it any more
    release: the request is over; what it does not share is free again

Only whole pages are shared: the last, partly filled page of a request is its own until it is full.

A model's layers may fall into several KV groups, each with pools and page tables of their own. At most one group keeps all
tokens; those with a window keep the newest ones, and a row gives pages back as its window moves on (`window_group`). Layers
that keep states have no pages; behind some pages of the others there are snapshots of their states (`state_group`).

Pages freed here may be written by the next step that is launched while a step launched earlier still reads them (a duplicate
that commit swapped out, a finished row). That is safe because steps run on the device in launch order: the reader is done
before the writer starts. For the same reason a prefix may be shared as soon as the step that computes it is launched. What is
not safe is to release a row that a launched step will still be *told about* by its results; the scheduler sees to that.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.cache.audit import LeakReport, audit, tree_pages
from jaxserve.cache.events import EventRecorder, KVCacheEvent
from jaxserve.cache.page_allocator import NO_PAGE, NoPages, PageAllocator, PageOwner
from jaxserve.cache.radix_cache import PrefixMatch, RadixCache
from jaxserve.cache.req_to_token import ReqToTokenPool
from jaxserve.cache.run_pages import RunPages
from jaxserve.cache.state_group import StateGroup
from jaxserve.cache.tree_node import TreeNode
from jaxserve.cache.window_group import WindowGroup
from jaxserve.runner import KVGroup, PageUpdates

# At least this share of what may go of a window's pages is evicted at a time.
WINDOW_EVICT_SHARE = 32


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """One request's hold on the cache from admission to release. Written by the CacheManager only."""

    row: int  # request row: index into the page table
    extra_key: str | None
    priority: int
    prefix_len: int  # tokens that came from the tree at admission; whole pages
    shared_len: int  # tokens at the front whose pages are the tree's now; whole pages
    node: TreeNode  # the deepest locked node; its path spells the tokens [0, shared_len)
    page_size: int
    row_num_pages: np.ndarray  # int32 [max_rows], the manager's
    goal_len: int  # tokens known at admission, all of which will be computed
    known_len: int  # of these the tree knew so many, whole pages
    given_from: int | None = None  # the first token whose page this request gave to the tree, if it gave any
    is_open: bool = True  # False once released

    @property
    def allocated_len(self) -> int:
        """Tokens [0, allocated_len) have pages."""
        return int(self.row_num_pages[self.row]) * self.page_size if self.is_open else 0


@dataclasses.dataclass(frozen=True)
class PoolUsage:
    """How full the pool of one KV group is."""

    window: int | None  # the group's
    used_tokens: int  # held by running requests, shared or not
    evictable_tokens: int  # of cached prefixes that nobody uses
    total_tokens: int

    @property
    def token_usage(self) -> float:
        return self.used_tokens / self.total_tokens


class CacheManager:
    def __init__(
        self,
        *,
        groups: Sequence[KVGroup],
        page_size: int,
        max_rows: int,
        max_pages_per_row: int,
        rows: range | None = None,
        eviction_policy: str = "lru",
        disable_radix: bool = False,
        num_snapshots: int = 0,
        snapshot_interval: int = 1,
        record_events: bool = False,
        on_eviction: Callable[[list[int], float], None] = lambda tokens, took_s: None,
    ) -> None:
        """`groups` and `num_snapshots` as in RunnerSpec; rows that decode leave one every `snapshot_interval` tokens.
        `rows`: the request rows that it may give out (None: all), as others are some other CacheManager's.
        `record_events`: there is something for `take_events`. `on_eviction` is told how many tokens of each group were evicted,
        and how long it took."""
        assert all(group.window is not None for group in groups[1:]), f"a group without a window must be the first: {groups}"
        self.num_pages = groups[0].num_pages  # of the first group, as everything that is counted below
        self.page_size = page_size
        self.disable_radix = disable_radix
        self.req_to_token = ReqToTokenPool(max_rows, max_pages_per_row, len(groups) + (num_snapshots > 0), rows)
        *tables, last_table = self.req_to_token.tables
        tables = tables if num_snapshots else [*tables, last_table]
        self.allocator = PageAllocator(self.num_pages) if groups[0].window is None else NoPages()
        self.windows = [
            WindowGroup(group, page_size, table, self.req_to_token.num_pages)
            for group, table in zip(groups, tables, strict=True)
            if group.window is not None
        ]
        self.states = StateGroup(num_snapshots, page_size, last_table, snapshot_interval) if num_snapshots else None
        self._in_tree: list[WindowGroup | StateGroup] = [*self.windows, *([] if self.states is None else [self.states])]
        self._events = EventRecorder(page_size) if record_events else None
        self.tree = RadixCache(page_size, eviction_policy, [group.window for group in self._in_tree], self._events)
        self._full_table = self.req_to_token.tables[0] if groups[0].window is None else None
        pools: list[PageAllocator | NoPages | WindowGroup] = [*([self.allocator] if self.keeps_all else []), *self.windows]
        self._pools = list(zip(tables, pools, strict=True))
        self._groups = tuple(groups)
        self._on_eviction = on_eviction
        self._leases: dict[int, Lease] = {}  # by row

    @property
    def keeps_all(self) -> bool:
        """Whether some group keeps all tokens."""
        return self._full_table is not None

    # --- how full it is, in tokens; of the first group, where nothing else is said

    def pool_usage(self) -> tuple[PoolUsage, ...]:
        """Of each group."""
        evictable = [*([self.tree.evictable_pages] if self.keeps_all else []), *(group.num_evictable for group in self.windows)]
        size = self.page_size
        return tuple(
            PoolUsage(group.window, (group.num_pages - pool.num_free - pages) * size, pages * size, group.num_pages * size)
            for group, (_, pool), pages in zip(self._groups, self._pools, evictable, strict=True)
        )

    def snapshot_usage(self) -> dict[str, int]:
        """How many snapshots of states there are, held by running requests, and in the tree only; {} without such layers."""
        states = self.states
        if states is None:
            return {}
        used = states.num_pages - states.num_available
        return {"total": states.num_pages, "used": used, "evictable": states.num_evictable}

    @property
    def free_tokens(self) -> int:
        _, first_pool = self._pools[0]
        return first_pool.num_free * self.page_size

    @property
    def evictable_tokens(self) -> int:
        """Cached prefixes that nobody uses."""
        evictable = self.tree.evictable_pages if self.keeps_all else self.windows[0].num_evictable
        return evictable * self.page_size

    @property
    def num_cached_tokens(self) -> int:
        """Prefixes that the tree knows, in use or not."""
        return self.tree.num_cached_pages * self.page_size

    @property
    def available_tokens(self) -> int:
        """What grow can hand out: free and evictable."""
        return self.free_tokens + self.evictable_tokens

    @property
    def used_tokens(self) -> int:
        """Held by running requests, shared or not."""
        return self._groups[0].num_pages * self.page_size - self.available_tokens

    @property
    def rows(self) -> range:
        """Those that it may give out."""
        return self.req_to_token.rows

    @property
    def free_rows(self) -> int:
        return self.req_to_token.free_rows

    @property
    def num_leases(self) -> int:
        """Requests that hold a row."""
        return len(self._leases)

    @property
    def page_tables(self) -> list[np.ndarray]:
        """Of each group int32 [max_rows, max_pages_per_row]; what the device's tables hold once all updates are drained.
        Entries behind a row's window are stale."""
        return [table.entries for table in self.req_to_token.tables]

    def drain_page_updates(self) -> PageUpdates:
        """The page-table entries written since the last call. An entry may occur twice, then with the same page."""
        return self.req_to_token.drain_updates()

    def take_events(self) -> list[KVCacheEvent]:
        """Which whole-page prefixes can be found, and which no longer, since the last call."""
        return self._events.take() if self._events is not None else []

    # --- the life of a request

    def match(self, token_ids: np.ndarray, extra_key: str | None = None) -> PrefixMatch:
        """How much of a prompt is cached, for ordering the queue. Holds nothing: the answer may be void by the next call."""
        if self.disable_radix:
            return PrefixMatch(0, self.tree.top)
        return self.tree.match(token_ids, extra_key)

    def admit(
        self,
        token_ids: np.ndarray,
        extra_key: str | None = None,
        *,
        priority: int = 0,
        most_reused: int | None = None,
    ) -> Lease | None:
        """A row with the cached prefix of the prompt in its page table, or None if no row is free.

        At least one token is left to compute: its logits are what the first output token is sampled from. Of the tokens from
        `most_reused` on all are, whatever is cached.
        """
        if self.req_to_token.free_rows == 0:
            return None
        limit = 0 if self.disable_radix else max(len(token_ids) - 1, 0)
        prefix = self.tree.acquire(token_ids[:limit][:most_reused], extra_key, priority)
        row = self.req_to_token.take_row()
        pages, windows = prefix.pages
        self.req_to_token.extend(row, len(pages))
        if self._full_table is not None:
            self._full_table.write(row, 0, pages)
        for group, window in zip(self._in_tree, windows, strict=True):
            group.begin(row, window)
        prefix_len = len(pages) * self.page_size
        lease = Lease(
            row=row,
            extra_key=extra_key,
            priority=priority,
            prefix_len=prefix_len,
            shared_len=prefix_len,
            node=prefix.node,
            page_size=self.page_size,
            row_num_pages=self.req_to_token.num_pages,
            goal_len=len(token_ids),
            known_len=prefix.num_known * self.page_size,
        )
        self._leases[row] = lease
        return lease

    def grow(self, lease: Lease, start: int, end: int) -> bool:
        """Pages for a step that computes tokens [start, end) of a row, and for all that the step reads: what is behind the
        windows of `start` is given back. False, and no page taken, if even eviction does not yield enough."""
        assert lease.is_open, f"grow of row {lease.row} after its release"
        self.slide_windows(np.array([lease.row]), np.array([start]))
        missing = -(-end // self.page_size) - int(self.req_to_token.num_pages[lease.row])
        if missing > 0:
            if not self._make_room(missing):
                return False
            self._extend(lease.row, missing)
        # The same prompt once again goes on before its last token, which may be a page of its own.
        newest = min(end, lease.goal_len - 1) // self.page_size * self.page_size
        self._leave_states(lease.row, start, sorted({length for length in (lease.known_len, newest) if start < length <= end}))
        return True

    def has_room(self, rows: np.ndarray, lengths: np.ndarray) -> bool:
        """Whether grow_rows to these lengths would succeed; with windows it may even if this says no."""
        return self._has_room(int(np.maximum(self._missing_pages(rows, lengths), 0).sum()))

    def slide_windows(self, rows: np.ndarray, starts: np.ndarray) -> None:
        """Rows whose next step computes tokens from starts[i] or later give back what none of these sees."""
        for group in self.windows:
            group.slide(rows, starts)

    def grow_rows(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, held: np.ndarray | None = None) -> bool:
        """grow for many distinct rows at once, all or none: rows[i] computes tokens from starts[i] or later to ends[i] or less,
        and holds at most held[i] (None: starts) before. No Python per row, as this runs before every decode step."""
        self.slide_windows(rows, starts)
        missing = self._missing_pages(rows, ends)
        most = int(missing.max(initial=0))
        if most > 0:
            is_short = missing > 0
            short, missing = rows[is_short], missing[is_short]
            if not self._make_room(int(missing.sum())):
                return False
            if most == 1:
                index = self.req_to_token.extend_by_one(short)
                for table, pool in self._pools:
                    table.write_one_each(short, index, pool.alloc(len(short)))
                if self.states is not None:
                    self.states.extend(short, index)
            else:
                for row, count in zip(short.tolist(), missing.tolist(), strict=True):
                    self._extend(row, count)
        if self.states is not None:
            # Places that no launched step can have passed: a snapshot is left by the step that passes it, or never.
            interval, held = self.states.interval, starts if held is None else held
            for at in np.flatnonzero(ends // interval > held // interval).tolist():
                first = (int(held[at]) // interval + 1) * interval
                self._leave_states(int(rows[at]), int(starts[at]), list(range(first, int(ends[at]) + 1, interval)))
        return True

    def commit(self, lease: Lease, token_ids: np.ndarray) -> None:
        """Shares the whole pages of token_ids, all of whose KV is valid or will be by a step launched before this call.

        token_ids starts at the sequence's first token. Where another request has brought the same tokens meanwhile, the
        tree's pages stay, this row is switched over to them and its own go back.
        """
        assert lease.is_open, f"commit of row {lease.row} after its release"
        assert len(token_ids) <= lease.allocated_len, f"{len(token_ids)} tokens, row {lease.row} holds {lease.allocated_len}"
        shared_end = len(token_ids) // self.page_size * self.page_size
        if self.disable_radix or shared_end <= lease.shared_len:
            return
        first = lease.shared_len // self.page_size
        own = self._row_pages(lease.row, first, shared_end // self.page_size)
        result = self.tree.insert(lease.node, token_ids[lease.shared_len : shared_end], own, lease.priority)
        num_existing = len(result.existing.pages)
        # A launched step may still read these duplicates; see the module's docstring for why they may be reused.
        self.allocator.free(own.pages[:num_existing], PageOwner.LEASED)
        self.allocator.give_to_tree(own.pages[num_existing:])
        if lease.given_from is None and num_existing < len(own.pages):
            lease.given_from = lease.shared_len + num_existing * self.page_size
        if self._full_table is not None:
            self._full_table.write(lease.row, first, result.existing.pages)
        for group, existing, taken in zip(self._in_tree, result.existing.windows, result.taken_windows, strict=True):
            group.switch(lease.row, first, existing)
            group.give_to_tree(taken)
        self.tree.lock(result.node, until=lease.node)
        lease.node = result.node
        lease.shared_len = shared_end

    def discard(self, lease: Lease) -> None:
        """Takes what this request gave to the tree out of it, and what others built on that since. What it found there stays.

        Requests that share such pages now keep them to their end, as taking them away would end requests that may well be
        sound; but what they go on to commit stands on the same ground, and is not found by others either.
        """
        assert lease.is_open, f"discard of row {lease.row} after its release"
        if lease.given_from is None:
            return
        node, start = lease.node, lease.shared_len
        while (start := start - len(node.pages) * self.page_size) > lease.given_from:
            assert node.parent is not None, f"row {lease.row}: no node begins at token {lease.given_from}"
            node = node.parent
        self._take_back(self.tree.discard(node))

    def release(self, lease: Lease, token_ids: np.ndarray | None = None) -> None:
        """Ends a lease. With tokens (those whose KV is valid), their whole pages are shared first; without (an abort, a
        retraction), only what was committed before stays cached."""
        assert lease.is_open, f"row {lease.row} released twice"
        if token_ids is not None:
            self.commit(lease, token_ids)
        own = self._row_pages(lease.row, lease.shared_len // self.page_size, int(self.req_to_token.num_pages[lease.row]))
        self.allocator.free(own.pages, PageOwner.LEASED)
        for group in self._in_tree:
            group.end(lease.row)
        self._take_back(self.tree.unlock(lease.node))
        self.req_to_token.return_row(lease.row)
        del self._leases[lease.row]
        lease.is_open = False

    # --- when idle

    def flush(self) -> bool:
        """Drops all cached prefixes. False, and nothing changed, while a lease is out."""
        if self._leases:
            return False
        self.tree.reset()
        self._rebuild_pools()
        return True

    def check(self) -> LeakReport:
        """Compares the books; only meaningful when no lease should be out."""
        return audit(self.tree, self.allocator, self._in_tree, self.req_to_token)

    def repair(self, report: LeakReport) -> None:
        """Makes the books right: ends leases nobody released, drops prefixes whose pages had a second owner (their KV may have
        been overwritten), and takes the tree's remaining pages as the only ones in use."""
        for lease in self._leases.values():
            lease.is_open = False
        self._leases = {}
        self.req_to_token.reset_rows()
        self.tree.rebuild(report.bad_pages)
        self._rebuild_pools()

    # --- pages

    def _extend(self, row: int, count: int) -> None:
        """More pages at the end of a row; there is room."""
        first = self.req_to_token.extend(row, count)
        for table, pool in self._pools:
            table.write(row, first, pool.alloc(count))
        if self.states is not None:
            self.states.extend(np.full(count, row, np.int32), np.arange(first, first + count, dtype=np.int32))

    def _leave_states(self, row: int, start: int, lengths: list[int]) -> None:
        """The step that begins at token `start` of a row, or later, leaves snapshots behind so many tokens, as far as there is
        room and it comes so far; else a later one does."""
        if self.states is None or not lengths:
            return
        self.states.let_go(row, start)
        for length in lengths:
            if self.states.has(row, length):  # a step that was planned before, and not launched
                continue
            if not self.states.num_free:
                count = max(self.states.num_evictable // WINDOW_EVICT_SHARE, 1)
                self._take_back(self.tree.evict_window(len(self.windows), count, self.states.is_held))
            if self.states.num_free:
                self.states.leave(row, length)

    def _row_pages(self, row: int, start: int, end: int) -> RunPages:
        """The pages [start, end) of a row."""
        table = self._full_table
        pages = np.full(end - start, NO_PAGE, np.int32) if table is None else table.entries[row, start:end].copy()
        return RunPages(pages, tuple(group.row_pages(row, start, end) for group in self._in_tree))

    def _take_back(self, given_up: RunPages) -> None:
        """What the tree gave up."""
        if len(given_up.pages):
            self.allocator.free(given_up.pages, PageOwner.TREE)
        for group, pages in zip(self._in_tree, given_up.windows, strict=True):
            group.take_from_tree(pages)

    def _rebuild_pools(self) -> None:
        cached = tree_pages(self.tree)
        self.allocator.rebuild(cached.pages)
        for group, pages in zip(self._in_tree, cached.windows, strict=True):
            group.rebuild(pages)

    def _missing_pages(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return (lengths + (self.page_size - 1)) // self.page_size - self.req_to_token.num_pages[rows]

    def _has_room(self, num_pages: int) -> bool:
        if num_pages > self.allocator.num_free + self.tree.evictable_pages:
            return False
        return all(num_pages <= group.num_available for group in self.windows)

    def _make_room(self, num_pages: int) -> bool:
        """Evicts until `num_pages` pages are free in every group. False, and nothing evicted, if that cannot be."""
        if not self._has_room(num_pages):
            return False
        free = [pool.num_free for _, pool in self._pools]
        if num_pages <= min(free):
            return True
        began_s = time.perf_counter()
        if (short := num_pages - self.allocator.num_free) > 0:
            self._take_back(self.tree.evict(short))
        for index, group in enumerate(self.windows):
            if (short := num_pages - group.num_free) > 0:
                # Looking for pages costs more than a page: held ones are passed over each time. So some more go at once.
                short = max(short, group.num_evictable // WINDOW_EVICT_SHARE)
                self._take_back(self.tree.evict_window(index, short, group.is_held))
        evicted = [(pool.num_free - before) * self.page_size for (_, pool), before in zip(self._pools, free, strict=True)]
        self._on_eviction(evicted, time.perf_counter() - began_s)
        return True
