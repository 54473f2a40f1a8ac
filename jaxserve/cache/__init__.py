"""KV page bookkeeping on the host: the radix prefix cache, the page allocator and the request rows' page tables."""

from jaxserve.cache.audit import LeakReport
from jaxserve.cache.events import KVCacheEvent
from jaxserve.cache.manager import CacheManager, Lease, PoolUsage
from jaxserve.cache.radix_cache import PrefixMatch, RadixCache
from jaxserve.cache.shards import LeakReports, ShardedCache
from jaxserve.cache.tree_node import TreeNode

__all__ = [
    "CacheManager", "KVCacheEvent", "LeakReport", "LeakReports", "Lease", "PoolUsage", "PrefixMatch", "RadixCache",
    "ShardedCache", "TreeNode",
]  # fmt: skip
