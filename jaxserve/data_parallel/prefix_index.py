"""PrefixIndex: which replica has probably cached which beginnings of prompts.

It knows what was sent to each replica and how much one can keep, and forgets as a radix cache does: what was used longest ago,
the ends of prompts before their beginnings. It is not told what replicas really hold: a request that finds less than was
expected is computed, and its prompt is there afterwards.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from jaxserve.data_parallel.prompt import BLOCK_TOKENS, Prompt


class PrefixIndex:
    def __init__(self, num_replicas: int) -> None:
        self._all = (1 << num_replicas) - 1
        self._holders: dict[int, int] = {}  # hash of a prefix -> bits of the replicas that have it
        # Per replica its hashes, those used longest ago first.
        self._blocks: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._capacities: list[int | None] = [None] * num_replicas  # in blocks

    def __len__(self) -> int:
        """Prefixes that some replica has."""
        return len(self._holders)

    def set_capacity(self, rank: int, num_tokens: int) -> None:
        """How much the replica can keep; until it is told, everything."""
        self._capacities[rank] = num_tokens // BLOCK_TOKENS
        self._forget_oldest(rank)

    def cached_lens(self, prompt: Prompt) -> list[int]:
        """Of each replica, how many of the prompt's first tokens it has."""
        lens = [0] * len(self._blocks)
        left, num_blocks = self._all, 0
        for block in prompt.hashes:
            holders = left & self._holders.get(block, 0)
            if holders != left:
                self._note(lens, left & ~holders, num_blocks)
                left = holders
                if not left:
                    break
            num_blocks += 1
        self._note(lens, left, num_blocks)
        return lens

    @staticmethod
    def _note(lens: list[int], ranks: int, num_blocks: int) -> None:
        while ranks:
            lowest = ranks & -ranks
            lens[lowest.bit_length() - 1] = num_blocks * BLOCK_TOKENS
            ranks ^= lowest

    def insert(self, rank: int, prompt: Prompt) -> int:
        """The replica computes the prompt, and has it from now on. Returns how many of its first tokens it had."""
        blocks, holders, bit = self._blocks[rank], self._holders, 1 << rank
        num_known = 0  # which are the first, as no block is kept longer than those before it
        for block in reversed(prompt.hashes):  # the beginning was used last, so that it goes last
            if block in blocks:
                blocks.move_to_end(block)
                num_known += 1
            else:
                blocks[block] = None
                holders[block] = holders.get(block, 0) | bit
        self._forget_oldest(rank)
        return num_known * BLOCK_TOKENS

    def clear(self, rank: int) -> None:
        """The replica has nothing any more."""
        self._drop(rank, list(self._blocks[rank]))
        self._blocks[rank].clear()

    def _forget_oldest(self, rank: int) -> None:
        capacity, blocks = self._capacities[rank], self._blocks[rank]
        if capacity is not None and len(blocks) > capacity:
            self._drop(rank, [blocks.popitem(last=False)[0] for _ in range(len(blocks) - capacity)])

    def _drop(self, rank: int, hashes: Sequence[int]) -> None:
        for block in hashes:
            left = self._holders[block] & ~(1 << rank)
            if left:
                self._holders[block] = left
            else:
                del self._holders[block]
