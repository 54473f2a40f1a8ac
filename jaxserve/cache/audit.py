"""The books of an idle cache, compared: every page is free or in the tree, once, and nothing is locked, held or leased.

Only meaningful when no request holds a lease. Finding something wrong is a bug to report, never a reason to stop serving:
`CacheManager.repair` makes the books right again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxserve.cache.page_allocator import NoPages, PageAllocator, PageOwner
from jaxserve.cache.radix_cache import RadixCache
from jaxserve.cache.req_to_token import ReqToTokenPool
from jaxserve.cache.run_pages import NO_PAGES, RunPages, concatenate, present
from jaxserve.cache.shared_pages import SharedPages

_SHOWN = 8  # entries of a list that a message spells out


@dataclasses.dataclass(frozen=True)
class PoolReport:
    """Of one KV group's pages."""

    name: str
    num_pages: int
    leaked: np.ndarray  # int32: neither free nor in the tree
    shared: np.ndarray  # int32: free twice, in the tree twice, or both; their KV cannot be trusted
    foreign: np.ndarray  # int32: page numbers the pool does not have

    @property
    def bad(self) -> np.ndarray:
        """Those that no prefix may use."""
        return np.concatenate([self.shared, self.foreign])

    def describe(self) -> list[str]:
        return [
            _listed(f"leaked pages{self.name}", self.leaked.tolist()),
            _listed(f"pages{self.name} owned more than once", self.shared.tolist()),
            _listed(f"page numbers{self.name} out of range", self.foreign.tolist()),
        ]


@dataclasses.dataclass(frozen=True)
class LeakReport:
    full: PoolReport | None  # of the group that keeps all tokens, if there is one
    windows: tuple[PoolReport, ...]
    busy_rows: list[int]  # request rows not given back
    locked_nodes: int  # tree nodes still locked
    wrong_counts: list[str]  # counters that disagree with what they count

    @property
    def _pools(self) -> tuple[PoolReport, ...]:
        return self.windows if self.full is None else (self.full, *self.windows)

    @property
    def is_clean(self) -> bool:
        lost = any(len(pool.leaked) or len(pool.bad) for pool in self._pools)
        return not (lost or self.busy_rows or self.locked_nodes or self.wrong_counts)

    @property
    def bad_pages(self) -> RunPages:
        """Those that no prefix may use."""
        return RunPages(NO_PAGES if self.full is None else self.full.bad, tuple(pool.bad for pool in self.windows))

    def describe(self) -> str:
        """One line for the log."""
        parts = [
            *(part for pool in self._pools for part in pool.describe()),
            _listed("request rows not released", self.busy_rows),
            f"{self.locked_nodes} tree nodes still locked" if self.locked_nodes else "",
            *self.wrong_counts,
        ]
        pages = " + ".join(str(pool.num_pages) for pool in self._pools)
        return f"KV cache of {pages} pages: " + ("; ".join(part for part in parts if part) or "no leaks")


def audit(
    tree: RadixCache, allocator: PageAllocator | NoPages, windows: Sequence[SharedPages], rows: ReqToTokenPool
) -> LeakReport:
    """Counts every page and node; costs milliseconds for a million pages."""
    cached = tree_pages(tree)
    wrong = _wrong_tree_counts(tree)
    full = None
    if isinstance(allocator, PageAllocator):
        full, in_tree = _compare("", cached.pages, allocator.free_pages(), allocator.num_pages)
        owner = np.where(in_tree, PageOwner.TREE, PageOwner.FREE)
        wrong += _mismatches("", int((allocator.owner != owner).sum()))
    reports = []
    for group, pages in zip(windows, cached.windows, strict=True):
        name = group.name
        report, in_tree = _compare(name, pages, group.free_pages(), group.num_pages)
        reports.append(report)
        wrong += _mismatches(name, int((group.in_tree != in_tree).sum() + (group.holds != 0).sum()))
        if group.num_evictable != len(pages):
            wrong.append(f"{group.num_evictable} pages{name} counted as evictable, there are {len(pages)}")
    return LeakReport(
        full=full,
        windows=tuple(reports),
        busy_rows=rows.busy_rows(),
        locked_nodes=sum(node.lock_count != 0 for node in tree.nodes()),
        wrong_counts=wrong,
    )


def tree_pages(tree: RadixCache) -> RunPages:
    """The pages of all nodes."""
    nodes = list(tree.nodes())
    windows = tuple(concatenate([present(node.windows[group]) for node in nodes]) for group in range(tree.num_windows))
    return RunPages(concatenate([node.pages for node in nodes]), windows)


def _compare(name: str, cached: np.ndarray, free: np.ndarray, num_pages: int) -> tuple[PoolReport, np.ndarray]:
    """The report, and which pages the tree has, bool [num_pages]."""
    cached, foreign = _split_by_range(cached, num_pages)
    free, foreign_free = _split_by_range(free, num_pages)
    leaked, shared = _leaked_and_shared(cached, free, num_pages)
    in_tree = np.zeros(num_pages, bool)
    in_tree[cached] = True
    return PoolReport(name, num_pages, leaked, shared, np.unique(np.concatenate([foreign, foreign_free]))), in_tree


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


def _wrong_tree_counts(tree: RadixCache) -> list[str]:
    nodes = list(tree.nodes())
    protected = sum(len(node.pages) for node in nodes if node.lock_count)
    evictable = sum(len(node.pages) for node in nodes) - protected
    wrong = []
    if tree.protected_pages != protected:
        wrong.append(f"{tree.protected_pages} pages counted as protected, there are {protected}")
    if tree.evictable_pages != evictable:
        wrong.append(f"{tree.evictable_pages} pages counted as evictable, there are {evictable}")
    return wrong


def _mismatches(name: str, count: int) -> list[str]:
    return [f"{count} pages{name} with a wrong owner"] if count else []


def _listed(what: str, values: list[int]) -> str:
    if not values:
        return ""
    shown = ", ".join(map(str, values[:_SHOWN]))
    return f"{len(values)} {what} ({shown}{', ...' if len(values) > _SHOWN else ''})"
