"""In which order waiting requests are tried: fcfs, lpm, dfs-weight, lof, random; urgency goes before all of them.

Retracted requests return before the others, in order of arrival: somebody has seen their first tokens already.

`priority` is fcfs with priority scheduling on. The cache-aware policies (lpm, dfs-weight) look at the radix trees for the first
`MAX_MATCHED_REQUESTS` requests only; those behind keep the order of arrival, so that a long queue does not cost a long time.
Requests are ordered here and admitted in `prefill_adder`, which also holds back a request whose prefix is just being computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from jaxserve.cache.radix_cache import PrefixMatch
from jaxserve.cache.shards import ShardedCache
from jaxserve.cache.tree_node import TreeNode
from jaxserve.scheduler.req import Req

MAX_MATCHED_REQUESTS = 128


class SchedulePolicy:
    def __init__(self, name: str, cache: ShardedCache, *, by_urgency: bool, rng: np.random.Generator) -> None:
        self._cache = cache
        self._rng = rng
        self._by_urgency = by_urgency or name == "priority"
        needs_tree = name in ("lpm", "dfs-weight")
        self._name = "fcfs" if name == "priority" or (needs_tree and cache.disable_radix) else name
        orders: dict[str, Callable[[list[Req]], list[Req]]] = {
            "fcfs": _by_arrival,
            "lof": _longest_output_first,
            "random": self._shuffled,
            "lpm": self._longest_prefix_first,
            "dfs-weight": self._heaviest_subtree_first,
        }
        self._order = orders[self._name]

    @property
    def reorders(self) -> bool:
        """A newcomer may overtake those that wait already."""
        return self._by_urgency or self._name != "fcfs"

    @property
    def looks_at_all(self) -> bool:
        """Anybody in the queue may be the first, however many wait; else it is one of the first MAX_MATCHED_REQUESTS."""
        return self._by_urgency or self._name in ("lof", "random")

    @property
    def by_urgency(self) -> bool:
        return self._by_urgency

    def order(self, waiting: list[Req]) -> list[Req]:
        """The requests in the order to try them; the argument, in which retracted ones stand first, is left alone. Ties keep
        the order of arrival."""
        retracted = [req for req in waiting if req.has_begun]
        fresh = [req for req in waiting if not req.has_begun] if retracted else waiting
        ordered = [*retracted, *self._order(fresh)]
        return sorted(ordered, key=lambda req: -req.urgency) if self._by_urgency else ordered

    def _shuffled(self, waiting: list[Req]) -> list[Req]:
        return [waiting[i] for i in self._rng.permutation(len(waiting)).tolist()]

    def _longest_prefix_first(self, waiting: list[Req]) -> list[Req]:
        matched = [(-match.length_tokens, at, req) for at, (req, match) in enumerate(self._match(waiting))]
        return [req for _, _, req in sorted(matched)] + waiting[len(matched) :]

    def _heaviest_subtree_first(self, waiting: list[Req]) -> list[Req]:
        matched = self._match(waiting)
        return _depth_first([(req, match.node) for req, match in matched]) + waiting[len(matched) :]

    def _match(self, waiting: list[Req]) -> list[tuple[Req, PrefixMatch]]:
        first = waiting[:MAX_MATCHED_REQUESTS]
        return [(req, self._cache.match(req.fill_ids, req.extra_key)) for req in first]


def _by_arrival(waiting: list[Req]) -> list[Req]:
    return waiting


def _longest_output_first(waiting: list[Req]) -> list[Req]:
    return sorted(waiting, key=lambda req: -req.max_new_tokens)


# A node of a tree. The roots of namespaces and the node above them, which have no tokens, are one for the trees of all shards:
# whether it is the latter, and the name.
_Place = TreeNode | tuple[bool, bytes | str | None]
_TOP: _Place = (True, None)


def _place(node: TreeNode) -> _Place:
    return node if node.key else (node.parent is None, node.edge)


def _depth_first(placed: list[tuple[Req, TreeNode]]) -> list[Req]:
    """Requests that share a path next to each other: subtrees with more requests first, a node's own requests after those of
    its children (SGLang's dfs-weight)."""
    own: dict[_Place, list[Req]] = defaultdict(list)
    weight: dict[_Place, int] = defaultdict(int)
    children: dict[_Place, dict[_Place, None]] = defaultdict(dict)  # in order
    for req, node in placed:
        own[_place(node)].append(req)
        weight[_place(node)] += 1
        while node.parent is not None:
            children[_place(node.parent)][_place(node)] = None
            node = node.parent
            weight[_place(node)] += 1
    ordered: list[Req] = []
    # Visited front to back in reverse (a node before its children, lightest child last on the stack), then turned around.
    stack = [_TOP]
    while stack:
        place = stack.pop()
        ordered.extend(reversed(own[place]))
        stack.extend(sorted(children[place], key=lambda child: -weight[child]))
    ordered.reverse()
    return ordered
