"""Walk: the way down the radix tree that some tokens take."""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.cache.tree_node import TreeNode


class Walk(NamedTuple):
    path: list[TreeNode]  # nodes entered, top down
    num_bytes: int  # matched in all
    last_pages: int  # matched in the last node of the path

    def cut(self, num_pages: int, page_bytes: int) -> Walk:
        """Its first pages."""
        path: list[TreeNode] = []
        left, last_pages = num_pages, 0
        for node in self.path:
            if left <= 0:
                break
            path.append(node)
            last_pages = min(left, len(node.pages))
            left -= last_pages
        return Walk(path, num_pages * page_bytes, last_pages)
