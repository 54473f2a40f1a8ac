"""What a radix tree holds, spelled out."""

from __future__ import annotations

from jaxserve.cache import RadixCache, TreeNode

Prefix = tuple[str | None, tuple[int, ...]]  # namespace and whole pages of tokens


def cached_prefixes(tree: RadixCache, page_size: int) -> dict[Prefix, int]:
    """What the tree says: each cached whole-page prefix and the page of its last tokens."""
    found: dict[Prefix, int] = {}
    stack: list[tuple[TreeNode, str | None, tuple[int, ...]]] = [(root, key, ()) for key, root in tree.top.children.items()]
    while stack:
        node, namespace, before = stack.pop()
        own = node.token_ids.tolist()
        for i, page in enumerate(node.pages.tolist()):
            prefix = (namespace, before + tuple(own[: (i + 1) * page_size]))
            assert prefix not in found, f"{prefix} stands in the tree twice"
            found[prefix] = page
        stack.extend((child, namespace, before + tuple(own)) for child in node.children.values())
    return found
