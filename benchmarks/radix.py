"""How long the scheduler's cache calls take: match and insert of a prompt in a full tree, a decode step's pages, eviction.

    python -m benchmarks.radix [--page-sizes 1,16,64] [--prompt-tokens 8192] [--tree-tokens 1048576]

No device is used. Each line is the median and the 90th percentile over fresh calls, in microseconds.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.cache.radix_cache import RadixCache
from jaxserve.cache.run_pages import RunPages
from jaxserve.runner import KVGroup

VOCAB_SIZE = 128_000
REPEATS = 60
ROWS = 256
TURN_TOKENS = 128


class Prompts:
    """Random prompts of one length; `shared` first tokens are the same in all, where wanted."""

    def __init__(self, num_tokens: int) -> None:
        self.rng = np.random.default_rng(0)
        self.num_tokens = num_tokens
        self.common = self.fresh()

    def fresh(self) -> np.ndarray:
        return self.rng.integers(0, VOCAB_SIZE, self.num_tokens, dtype=np.int32)

    def sharing(self, shared_tokens: int) -> np.ndarray:
        prompt = self.fresh()
        prompt[:shared_tokens] = self.common[:shared_tokens]
        return prompt


def filled_tree(page_size: int, prompts: Prompts, tree_tokens: int, shared_tokens: int) -> tuple[RadixCache, list[np.ndarray]]:
    """A tree of tree_tokens distinct tokens, all of whose prompts share the first shared_tokens."""
    tree = RadixCache(page_size)
    stored = []
    while tree.num_cached_pages * page_size < tree_tokens:
        prompt = prompts.sharing(shared_tokens)
        match_and_insert(tree, prompt)
        stored.append(prompt)
    return tree, stored


def match_and_insert(tree: RadixCache, prompt: np.ndarray) -> None:
    """What the tree does for one request: find and lock its prefix, add the rest, unlock."""
    prefix = tree.acquire(prompt, None, 0)
    matched = len(prefix.pages.pages)
    pages = np.arange(matched, len(prompt) // tree.page_size, dtype=np.int32)
    rest = prompt[matched * tree.page_size : len(prompt) // tree.page_size * tree.page_size]
    result = tree.insert(prefix.node, rest, RunPages(pages), 0)
    tree.lock(result.node, until=prefix.node)
    tree.unlock(result.node)


def prompt_cases(
    page_size: int, prompts: Prompts, tree_tokens: int
) -> Iterator[tuple[str, Callable[[], Callable[[], object]]]]:
    """(name, make): make() prepares one call, untimed, and returns it."""
    n = prompts.num_tokens
    alone, stored = filled_tree(page_size, prompts, tree_tokens, 0)
    shared, _ = filled_tree(page_size, prompts, tree_tokens, n * 3 // 4)
    order = iter(prompts.rng.permutation(len(stored)).tolist() * REPEATS)

    def splitting() -> np.ndarray:
        prompt = stored[next(order)].copy()
        cut = int(prompts.rng.integers(n // 4, n * 3 // 4))
        prompt[cut:] = prompts.fresh()[cut:]
        return prompt

    yield "match, whole prompt cached", lambda: bind(alone.match, stored[next(order)], None)
    yield "match+insert, nothing cached", lambda: bind(match_and_insert, alone, prompts.fresh())
    yield "match+insert, all cached", lambda: bind(match_and_insert, alone, stored[next(order)])
    yield "match+insert, 3/4 shared with all others", lambda: bind(match_and_insert, shared, prompts.sharing(n * 3 // 4))
    yield "match+insert, splits a node", lambda: bind(match_and_insert, alone, splitting())
    chain = turns(page_size, prompts)
    yield (
        f"match+insert, {n // TURN_TOKENS} nodes deep",
        lambda: bind(match_and_insert, chain, prompts.sharing(n - TURN_TOKENS)),
    )


def turns(page_size: int, prompts: Prompts) -> RadixCache:
    """A conversation that was cached turn by turn: one node per TURN_TOKENS."""
    tree = RadixCache(page_size)
    for end in range(TURN_TOKENS, prompts.num_tokens + 1, TURN_TOKENS):
        match_and_insert(tree, prompts.common[:end])
    return tree


def manager_cases(
    page_size: int, prompts: Prompts, tree_tokens: int
) -> Iterator[tuple[str, Callable[[], Callable[[], object]]]]:
    pages_per_prompt = prompts.num_tokens // page_size + 1
    full = CacheManager(
        groups=(KVGroup(tree_tokens // page_size),), page_size=page_size, max_rows=ROWS, max_pages_per_row=pages_per_prompt
    )
    whole_life(full, prompts.fresh())
    while full.free_tokens >= prompts.num_tokens:
        whole_life(full, prompts.fresh())
    yield "a request's life, evicting others", lambda: bind(whole_life, full, prompts.fresh())

    pages_per_row = 4 * REPEATS
    decoding = CacheManager(
        groups=(KVGroup(ROWS * pages_per_row),), page_size=page_size, max_rows=ROWS, max_pages_per_row=pages_per_row
    )
    leases = [decoding.admit(prompts.fresh()) for _ in range(ROWS)]
    rows = np.asarray([lease.row for lease in leases if lease is not None], np.int32)
    length = np.zeros(1, np.int32)

    def bounds() -> tuple[np.ndarray, np.ndarray]:
        """Where the rows' next tokens begin and end: one each."""
        return np.full(ROWS, length[0] - 1, np.int32), np.full(ROWS, length[0], np.int32)

    def step(crossing: bool) -> Callable[[], object]:
        decoding.drain_page_updates()
        length[0] += 1
        while (length[0] % page_size == 1 % page_size) != crossing:
            assert decoding.grow_rows(rows, *bounds()), "no room"
            length[0] += 1
        return bind(decoding.grow_rows, rows, *bounds())

    def drain() -> Callable[[], object]:
        step(True)()
        return decoding.drain_page_updates

    if page_size > 1:
        yield f"grow_rows, {ROWS} rows, none crosses a page", lambda: step(False)
    yield f"grow_rows, {ROWS} rows, all cross a page", lambda: step(True)
    yield f"drain_page_updates after {ROWS} crossings", drain
    yield "check of a full cache", lambda: full.check


def whole_life(cache: CacheManager, prompt: np.ndarray) -> None:
    cache.match(prompt)
    lease = cache.admit(prompt)
    assert lease is not None, "no free row"
    assert cache.grow(lease, 0, len(prompt)), "no room"
    cache.drain_page_updates()
    cache.commit(lease, prompt)
    cache.release(lease, prompt)


def bind(call: Callable[..., object], *args: object) -> Callable[[], object]:
    return lambda: call(*args)


def measure(make: Callable[[], Callable[[], object]]) -> tuple[float, float]:
    taken_us = []
    for _ in range(REPEATS):
        call = make()
        start = time.perf_counter()
        call()
        taken_us.append((time.perf_counter() - start) * 1e6)
    return float(np.median(taken_us)), float(np.percentile(taken_us, 90))


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the KV cache's bookkeeping on the host.")
    parser.add_argument("--page-sizes", default="1,16,64", help="Comma-separated tokens per page.")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--tree-tokens", type=int, default=1 << 20)
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}")
    print(f"prompt {args.prompt_tokens} tokens, tree {args.tree_tokens} tokens; median / p90 in us")
    for page_size in map(int, args.page_sizes.split(",")):
        prompts = Prompts(args.prompt_tokens)
        for cases in (prompt_cases, manager_cases):
            for name, make in cases(page_size, prompts, args.tree_tokens):
                median_us, p90_us = measure(make)
                print(f"page_size {page_size:3}  {name:45} {median_us:9.1f} {p90_us:9.1f}", flush=True)


if __name__ == "__main__":
    main()
