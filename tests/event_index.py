"""A router's index, made of KV cache events alone: which prefixes can be found. Events that make no sense are an error."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from jaxserve.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

Prefix = tuple[str | None, tuple[int, ...]]  # salt of the namespace, and the tokens up to the block's end


def expected_hash(tokens: tuple[int, ...], page_size: int, salt: str | None = None) -> int:
    """Of a prefix's last block, as SGLang's router computes it."""
    digest = b"" if salt is None else hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest()
    for start in range(0, len(tokens), page_size):
        page = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + page_size])
        digest = hashlib.sha256(digest + page).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


class EventIndex:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.by_hash: dict[int, Prefix] = {}

    @property
    def prefixes(self) -> set[Prefix]:
        return set(self.by_hash.values())

    def take_in(self, events: Iterable[KVCacheEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    assert event.medium == "GPU"
                    for block_hash in event.block_hashes:
                        del self.by_hash[block_hash]
                case AllBlocksCleared():
                    self.by_hash.clear()

    def _store(self, event: BlockStored) -> None:
        assert (event.block_size, event.lora_id, event.medium) == (self.page_size, None, "GPU")
        assert len(event.token_ids) == self.page_size * len(event.block_hashes) > 0
        before: tuple[int, ...] = ()
        if event.parent_block_hash is not None:
            salt, before = self.by_hash[event.parent_block_hash]
            assert salt == event.cache_salt
        for i, block_hash in enumerate(event.block_hashes):
            tokens = before + tuple(event.token_ids[: (i + 1) * self.page_size])
            assert block_hash not in self.by_hash, f"{tokens} is stored twice"
            assert block_hash == expected_hash(tokens, self.page_size, event.cache_salt)
            self.by_hash[block_hash] = (event.cache_salt, tokens)
