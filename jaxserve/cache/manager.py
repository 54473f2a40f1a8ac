"""CacheManager: the sole owner of page lifetime, and with it of request rows and of the radix tree.

The scheduler asks for a Lease per running request and names lengths and tokens; it never sees a free list or frees a page.

    admit -> Lease: a row, the cached prefix locked and in its page table
    grow / grow_rows: pages for more tokens, evicting unlocked prefixes if needed
    commit: whole pages so far go to the tree, for others to share     (any number of times)
    discard: what the request brought to the tree cannot be trusted; nobody is given it any more
    release: the request is over; what it does not share is free again

Only whole pages are shared: the last, partly filled page of a request is its own until it is full.

Pages freed here may be written by the next step that is launched while a step launched earlier still reads them (a duplicate
that commit swapped out, a finished row). That is safe because steps run on the device in launch order: the reader is done
before the writer starts. For the same reason a prefix may be shared as soon as the step that computes it is launched. What is
not safe is to release a row that a launched step will still be *told about* by its results; the scheduler sees to that.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.cache.audit import LeakReport, audit, tree_pages
from jaxserve.cache.page_allocator import PageAllocator, PageOwner
from jaxserve.cache.radix_cache import PrefixMatch, RadixCache
from jaxserve.cache.req_to_token import ReqToTokenPool
from jaxserve.cache.tree_node import TreeNode
from jaxserve.runner import PageUpdates


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
    given_from: int | None = None  # the first token whose page this request gave to the tree, if it gave any
    is_open: bool = True  # False once released

    @property
    def allocated_len(self) -> int:
        """Tokens [0, allocated_len) have pages."""
        return int(self.row_num_pages[self.row]) * self.page_size if self.is_open else 0


class CacheManager:
    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_pages_per_row: int,
        eviction_policy: str = "lru",
        disable_radix: bool = False,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.disable_radix = disable_radix
        self.allocator = PageAllocator(num_pages)
        self.tree = RadixCache(page_size, eviction_policy)
        self.req_to_token = ReqToTokenPool(max_rows, max_pages_per_row)
        self._leases: dict[int, Lease] = {}  # by row

    # --- how full it is, in tokens

    @property
    def free_tokens(self) -> int:
        return self.allocator.num_free * self.page_size

    @property
    def evictable_tokens(self) -> int:
        """Cached prefixes that nobody uses."""
        return self.tree.evictable_pages * self.page_size

    @property
    def protected_tokens(self) -> int:
        """Cached prefixes that some lease uses."""
        return self.tree.protected_pages * self.page_size

    @property
    def available_tokens(self) -> int:
        """What grow can hand out: free and evictable."""
        return self.free_tokens + self.evictable_tokens

    @property
    def used_tokens(self) -> int:
        """What running requests hold, shared or not."""
        return self.num_pages * self.page_size - self.available_tokens

    @property
    def free_rows(self) -> int:
        return self.req_to_token.free_rows

    @property
    def page_table(self) -> np.ndarray:
        """int32 [max_rows, max_pages_per_row]; what the device's table holds once all updates are drained."""
        return self.req_to_token.page_table

    def drain_page_updates(self) -> PageUpdates:
        """The page-table entries written since the last call. An entry may occur twice, then with the same page."""
        return self.req_to_token.drain_updates()

    # --- the life of a request

    def match(self, token_ids: np.ndarray, extra_key: str | None = None) -> PrefixMatch:
        """How much of a prompt is cached, for ordering the queue. Holds nothing: the answer may be void by the next call."""
        if self.disable_radix:
            return PrefixMatch(0, self.tree.top)
        return self.tree.match(token_ids, extra_key)

    def admit(self, token_ids: np.ndarray, extra_key: str | None = None, *, priority: int = 0) -> Lease | None:
        """A row with the cached prefix of the prompt in its page table, or None if no row is free.

        At least one token is left to compute: its logits are what the first output token is sampled from.
        """
        if self.req_to_token.free_rows == 0:
            return None
        limit = 0 if self.disable_radix else max(len(token_ids) - 1, 0)
        prefix = self.tree.acquire(token_ids[:limit], extra_key, priority)
        row = self.req_to_token.take_row()
        self.req_to_token.append(row, prefix.pages)
        prefix_len = len(prefix.pages) * self.page_size
        lease = Lease(
            row=row,
            extra_key=extra_key,
            priority=priority,
            prefix_len=prefix_len,
            shared_len=prefix_len,
            node=prefix.node,
            page_size=self.page_size,
            row_num_pages=self.req_to_token.num_pages,
        )
        self._leases[row] = lease
        return lease

    def grow(self, lease: Lease, new_len: int) -> bool:
        """Gives a row pages for tokens [0, new_len). False, and nothing changed, if even eviction does not yield enough."""
        assert lease.is_open, f"grow of row {lease.row} after its release"
        missing = -(-new_len // self.page_size) - int(self.req_to_token.num_pages[lease.row])
        if missing <= 0:
            return True
        if not self._make_room(missing):
            return False
        self.req_to_token.append(lease.row, self.allocator.alloc(missing))
        return True

    def pages_needed_rows(self, rows: np.ndarray, lengths: np.ndarray) -> int:
        """New pages that grow_rows of the same arguments would take."""
        return int(np.maximum(self._missing_pages(rows, lengths), 0).sum())

    def grow_rows(self, rows: np.ndarray, lengths: np.ndarray) -> bool:
        """grow for many distinct rows at once, all or none: row rows[i] must hold lengths[i] tokens. No Python per row, as
        this runs before every decode step."""
        missing = self._missing_pages(rows, lengths)
        most = int(missing.max(initial=0))
        if most <= 0:
            return True
        if most == 1:
            rows = rows[missing > 0]
            if not self._make_room(len(rows)):
                return False
            self.req_to_token.append_one_each(rows, self.allocator.alloc(len(rows)))
            return True
        return self._grow_rows_by_many(rows, np.maximum(missing, 0))

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
        own = self.page_table[lease.row, first : shared_end // self.page_size].copy()
        result = self.tree.insert(lease.node, token_ids[lease.shared_len : shared_end], own, lease.priority)
        num_existing = len(result.existing_pages)
        # A launched step may still read these duplicates; see the module's docstring for why they may be reused.
        self.allocator.free(own[:num_existing], PageOwner.LEASED)
        self.allocator.give_to_tree(own[num_existing:])
        if lease.given_from is None and num_existing < len(own):
            lease.given_from = lease.shared_len + num_existing * self.page_size
        self.req_to_token.replace(lease.row, first, result.existing_pages)
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
        self.allocator.free(self.tree.discard(node), PageOwner.TREE)

    def release(self, lease: Lease, token_ids: np.ndarray | None = None) -> None:
        """Ends a lease. With tokens (those whose KV is valid), their whole pages are shared first; without (an abort, a
        retraction), only what was committed before stays cached."""
        assert lease.is_open, f"row {lease.row} released twice"
        if token_ids is not None:
            self.commit(lease, token_ids)
        own = self.req_to_token.row_pages(lease.row, lease.shared_len // self.page_size)
        self.allocator.free(own, PageOwner.LEASED)
        if len(discarded := self.tree.unlock(lease.node)):
            self.allocator.free(discarded, PageOwner.TREE)
        self.req_to_token.return_row(lease.row)
        del self._leases[lease.row]
        lease.is_open = False

    # --- when idle

    def flush(self) -> bool:
        """Drops all cached prefixes. False, and nothing changed, while a lease is out."""
        if self._leases:
            return False
        self.tree.reset()
        self.allocator.rebuild(tree_pages(self.tree))
        return True

    def check(self) -> LeakReport:
        """Compares the books; only meaningful when no lease should be out."""
        return audit(self.tree, self.allocator, self.req_to_token)

    def repair(self, report: LeakReport) -> None:
        """Makes the books right: ends leases nobody released, drops prefixes whose pages had a second owner (their KV may have
        been overwritten), and takes the tree's remaining pages as the only ones in use."""
        for lease in self._leases.values():
            lease.is_open = False
        self._leases = {}
        self.req_to_token.reset_rows()
        self.tree.rebuild(bad_pages=np.concatenate([report.shared_pages, report.foreign_pages]))
        self.allocator.rebuild(tree_pages(self.tree))

    # --- pages

    def _missing_pages(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return (lengths + (self.page_size - 1)) // self.page_size - self.req_to_token.num_pages[rows]

    def _make_room(self, num_pages: int) -> bool:
        """Evicts until `num_pages` pages are free. False, and nothing evicted, if that cannot be."""
        short = num_pages - self.allocator.num_free
        if short > 0:
            if short > self.tree.evictable_pages:
                return False
            self.allocator.free(self.tree.evict(short), PageOwner.TREE)
        return True

    def _grow_rows_by_many(self, rows: np.ndarray, missing: np.ndarray) -> bool:
        """The rare case that some row crosses several pages in one step."""
        if not self._make_room(int(missing.sum())):
            return False
        for row, count in zip(rows.tolist(), missing.tolist(), strict=True):
            if count:
                self.req_to_token.append(row, self.allocator.alloc(count))
        return True
