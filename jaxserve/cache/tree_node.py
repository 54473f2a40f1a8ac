"""A node of the radix tree: a run of whole pages of tokens, the pages that hold their KV, and what eviction needs to know.

A page of a window's layers may be gone while the tokens stay: `windows` holds NO_PAGE in its place.

Plain data: `jaxserve.cache.radix_cache` alone writes it. The scheduler's policies may read `id`, `parent` and `children`.
"""

from __future__ import annotations

import numpy as np


class TreeNode:
    __slots__ = (
        "children", "created", "digests", "discarded", "edge", "hits", "id", "key", "last_access", "lock_count", "pages",
        "parent", "priority", "windows",
    )  # fmt: skip

    def __init__(
        self,
        *,
        id: int,
        parent: TreeNode | None,
        edge: bytes | str | None,
        key: bytes,
        pages: np.ndarray,
        windows: tuple[np.ndarray, ...],
        tick: int,
    ) -> None:
        self.id = id  # never used twice
        self.parent = parent  # None for the one node above all namespaces
        self.edge = edge  # what the parent calls this node: its first page's tokens, or a namespace
        # The tokens as int32 bytes, not as an array: "does the prompt go on with this key" is then one memcmp without a
        # copy (bytes.startswith), whatever the length.
        self.key = key
        self.pages = pages  # int32, one for each page of tokens in key
        self.windows = windows  # the same for each KV group with a window
        self.digests = b""  # of its pages, where events are recorded (`jaxserve.cache.events`)
        self.children: dict[bytes | str | None, TreeNode] = {}
        self.lock_count = 0  # leases that hold this node or one below it
        self.last_access = tick
        self.created = tick
        self.hits = 0  # admissions that used it
        self.priority = 0  # the largest of any request that used it
        self.discarded = False  # out of reach: held by those who had it already, and gone with the last of them

    @property
    def token_ids(self) -> np.ndarray:
        """The key as int32 tokens (a read-only view)."""
        return np.frombuffer(self.key, np.int32)

    def __repr__(self) -> str:
        return f"TreeNode(id={self.id}, pages={len(self.pages)}, children={len(self.children)}, lock_count={self.lock_count})"
