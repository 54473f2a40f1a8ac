"""The books of an idle cache, compared: every page is free or in the tree, once, and nothing is locked or leased.

Only meaningful when no request holds a lease. Finding something wrong is a bug to report, never a reason to stop serving:
`CacheManager.repair` makes the books right again.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.cache.page_allocator import PageAllocator, PageOwner
from jaxserve.cache.radix_cache import NO_PAGES, RadixCache
from jaxserve.cache.req_to_token import ReqToTokenPool

_SHOWN = 8  # entries of a list that a message spells out


@dataclasses.dataclass(frozen=True)
class LeakReport:
    num_pages: int
    leaked_pages: np.ndarray  # int32: neither free nor in the tree
    shared_pages: np.ndarray  # int32: free twice, in the tree twice, or both; their KV cannot be trusted
    foreign_pages: np.ndarray  # int32: page numbers the pool does not have
    busy_rows: list[int]  # request rows not given back
    locked_nodes: int  # tree nodes still locked
    wrong_counts: list[str]  # counters that disagree with what they count

    @property
    def is_clean(self) -> bool:
        return not (
            len(self.leaked_pages)
            or len(self.shared_pages)
            or len(self.foreign_pages)
            or self.busy_rows
            or self.locked_nodes
            or self.wrong_counts
        )

    def describe(self) -> str:
        """One line for the log."""
        parts = [
            _listed("leaked pages", self.leaked_pages.tolist()),
            _listed("pages owned more than once", self.shared_pages.tolist()),
            _listed("page numbers out of range", self.foreign_pages.tolist()),
            _listed("request rows not released", self.busy_rows),
            f"{self.locked_nodes} tree nodes still locked" if self.locked_nodes else "",
            *self.wrong_counts,
        ]
        return f"KV cache of {self.num_pages} pages: " + ("; ".join(part for part in parts if part) or "no leaks")


def audit(tree: RadixCache, allocator: PageAllocator, rows: ReqToTokenPool) -> LeakReport:
    """Counts every page and node; costs milliseconds for a million pages."""
    in_tree, foreign = _split_by_range(tree_pages(tree), allocator.num_pages)
    free, foreign_free = _split_by_range(allocator.free_pages(), allocator.num_pages)
    leaked, shared = _leaked_and_shared(in_tree, free, allocator.num_pages)
    return LeakReport(
        num_pages=allocator.num_pages,
        leaked_pages=leaked,
        shared_pages=shared,
        foreign_pages=np.unique(np.concatenate([foreign, foreign_free])),
        busy_rows=rows.busy_rows(),
        locked_nodes=sum(node.lock_count != 0 for node in tree.nodes()),
        wrong_counts=_wrong_counts(tree, allocator, in_tree),
    )


def tree_pages(tree: RadixCache) -> np.ndarray:
    """int32: the pages of all nodes."""
    return np.concatenate([NO_PAGES, *(node.pages for node in tree.nodes())])


def _leaked_and_shared(in_tree: np.ndarray, free: np.ndarray, num_pages: int) -> tuple[np.ndarray, np.ndarray]:
    """Pages that nobody claims, and those claimed more than once."""
    seen = np.zeros(num_pages, np.bool_)
    seen[in_tree] = True
    seen[free] = True
    if len(in_tree) + len(free) == num_pages and seen.all():
        return NO_PAGES, NO_PAGES  # the usual case; counting claims takes several times longer
    claims = np.bincount(np.concatenate([in_tree, free]), minlength=num_pages)
    return np.flatnonzero(claims == 0).astype(np.int32), np.flatnonzero(claims > 1).astype(np.int32)


def _split_by_range(pages: np.ndarray, num_pages: int) -> tuple[np.ndarray, np.ndarray]:
    """(pages of the pool, page numbers it does not have)"""
    if len(pages) == 0 or (pages.min() >= 0 and pages.max() < num_pages):
        return pages, NO_PAGES
    is_ours = (pages >= 0) & (pages < num_pages)
    return pages[is_ours], pages[~is_ours]


def _wrong_counts(tree: RadixCache, allocator: PageAllocator, in_tree: np.ndarray) -> list[str]:
    nodes = list(tree.nodes())
    protected = sum(len(node.pages) for node in nodes if node.lock_count)
    evictable = sum(len(node.pages) for node in nodes) - protected
    owner = np.zeros(allocator.num_pages, np.uint8)
    owner[in_tree] = PageOwner.TREE
    wrong = []
    if tree.protected_pages != protected:
        wrong.append(f"{tree.protected_pages} pages counted as protected, there are {protected}")
    if tree.evictable_pages != evictable:
        wrong.append(f"{tree.evictable_pages} pages counted as evictable, there are {evictable}")
    if mismatches := int((allocator.owner != owner).sum()):
        wrong.append(f"{mismatches} pages with a wrong owner")
    return wrong


def _listed(what: str, values: list[int]) -> str:
    if not values:
        return ""
    shown = ", ".join(map(str, values[:_SHOWN]))
    return f"{len(values)} {what} ({shown}{', ...' if len(values) > _SHOWN else ''})"
