"""KV cache events: what the radix tree gains and loses, for routers that keep an index of what is cached where.

Names, fields and hashes are SGLang's, so that what reads its events reads these. A block is a page. Its hash is the beginning
of a SHA-256 of the block before it (that one's whole digest) and its own tokens: a prefix has the same hashes in every replica,
process and version, and whoever knows the tokens can compute them.

The hashes of a node's pages stand in the node (`TreeNode.digests`), so a split only divides them. Knows no sockets: who
publishes takes the events (`EventRecorder.take`) and encodes them.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from jaxserve.cache.tree_node import TreeNode
from jaxserve.namespaces import adapter_of, salt_of

MEDIUM_GPU = "GPU"  # SGLang's word for the memory of the devices, whatever they are
# SGLang's router refuses events of more than 65,536 blocks or a million tokens.
MOST_BLOCKS = 4096
_DIGEST_BYTES = 32
_SALT_PREFIX = b"sglang-cache-salt-v1\0"


class KVCacheEvent(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Base of all events. The tag (the class name) is the key `type`."""


class BlockStored(KVCacheEvent):
    """Blocks that follow each other, and can be found from now on."""

    block_hashes: list[int]  # int64
    parent_block_hash: int | None  # of the block before the first; None: they begin a sequence
    token_ids: list[int]  # of all blocks; uint32
    block_size: int  # tokens
    lora_id: int | None  # version of the LoRA adapter that computed them; which one that is says the salt
    medium: str | None = None
    cache_salt: str | None = None  # of the namespace that they are in


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """Nothing is cached now. Also the first event of all."""


class EventRecorder:
    """What happened since the last `take`."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._events: list[KVCacheEvent] = []

    def take(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events

    def stored(self, leaf: TreeNode) -> None:
        """A node was added below one that has its digests already."""
        assert leaf.parent is not None, "the top node stores nothing"
        namespace = _namespace(leaf)
        salt = None if namespace is None else salt_of(namespace)
        adapter = None if namespace is None else adapter_of(namespace)
        before = leaf.parent.digests[-_DIGEST_BYTES:]
        leaf.digests = _chain(before or _seed(salt), leaf.key, len(leaf.pages))
        hashes = _hashes_of(leaf.digests)
        token_ids = np.frombuffer(leaf.key, np.uint32).tolist()
        parent = _hashes_of(before)[-1] if before else None
        for start in range(0, len(hashes), MOST_BLOCKS):
            end = start + MOST_BLOCKS
            self._events.append(
                BlockStored(
                    block_hashes=hashes[start:end],
                    parent_block_hash=parent,
                    token_ids=token_ids[start * self._page_size : end * self._page_size],
                    block_size=self._page_size,
                    lora_id=None if adapter is None else adapter.version,
                    medium=MEDIUM_GPU,
                    cache_salt=salt,
                )
            )
            parent = hashes[min(end, len(hashes)) - 1]

    def removed(self, node: TreeNode, keep: int = 0) -> None:
        """Only the first `keep` pages of a node are left."""
        hashes = _hashes_of(node.digests[keep * _DIGEST_BYTES :])
        for start in range(0, len(hashes), MOST_BLOCKS):
            self._events.append(BlockRemoved(hashes[start : start + MOST_BLOCKS], MEDIUM_GPU))

    def cleared(self) -> None:
        self._events = [AllBlocksCleared()]  # what came before does not matter any more


def divide(digests: bytes, num_pages: int) -> tuple[bytes, bytes]:
    """Of a node that is cut behind its first `num_pages`."""
    cut = num_pages * _DIGEST_BYTES
    return digests[:cut], digests[cut:]


def _namespace(node: TreeNode) -> str | None:
    """A namespace's root has no tokens, and is called by its name."""
    while node.key:
        assert node.parent is not None
        node = node.parent
    assert not isinstance(node.edge, bytes)
    return node.edge


def _seed(salt: str | None) -> bytes:
    """What stands before the first block."""
    return b"" if salt is None else hashlib.sha256(_SALT_PREFIX + salt.encode()).digest()


def _chain(digest: bytes, key: bytes, num_pages: int) -> bytes:
    page_bytes = len(key) // num_pages
    digests = []
    for start in range(0, len(key), page_bytes):
        digest = hashlib.sha256(digest + key[start : start + page_bytes]).digest()
        digests.append(digest)
    return b"".join(digests)


def _hashes_of(digests: bytes) -> list[int]:
    """The first 64 bits of each, as signed numbers."""
    hashes: list[int] = np.frombuffer(digests, ">i8")[:: _DIGEST_BYTES // 8].tolist()
    return hashes
