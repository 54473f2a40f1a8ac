"""How much of its prompts a router's requests find cached: groups of prompts that share a beginning, sent through it.

    python -m benchmarks.router_cache_hits --router URL --worker URL --worker URL [--groups 40] [--rounds 6] [--words 160]
        [--parallel 8] [--completions]

Flushes the workers' caches first, so they must serve nothing else. In each round every group is asked once, in an order of
its own, with an end of its own, so many at a time. Prints which share of all prompt tokens was cached, as the workers' own
`meta_info.cached_tokens` says, and how many requests each worker got. With --completions requests go to /v1/completions
instead of /generate, and workers need --enable-cache-report.
"""

from __future__ import annotations

import argparse
import functools
import random
from concurrent.futures import ThreadPoolExecutor

import httpx

_WORDS = ("sea", "hill", "tree", "bird", "wind", "stone", "river", "cloud", "field", "house", "light", "road", "bread", "night")


def prompts(num_groups: int, num_rounds: int, num_words: int) -> list[str]:
    rng = random.Random(0)
    beginnings = [f"{group}: " + " ".join(rng.choices(_WORDS, k=num_words)) for group in range(num_groups)]
    asked = []
    for _ in range(num_rounds):
        asked += [f"{beginning} {rng.randrange(10**6)}" for beginning in rng.sample(beginnings, num_groups)]
    return asked


def served(client: httpx.Client, worker: str) -> int:
    states = client.get(f"{worker}/server_info").json()["internal_states"]
    return sum(int(state["num_requests"]) for state in states)


def generate(client: httpx.Client, router: str, text: str) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them were cached."""
    body = {"text": text, "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}}
    meta = client.post(f"{router}/generate", json=body).raise_for_status().json()["meta_info"]
    return meta["prompt_tokens"], meta["cached_tokens"]


def complete(client: httpx.Client, router: str, text: str) -> tuple[int, int]:
    body = {"prompt": text, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    usage = client.post(f"{router}/v1/completions", json=body).raise_for_status().json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", required=True)
    parser.add_argument("--worker", action="append", required=True)
    parser.add_argument("--groups", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--words", type=int, default=160)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--completions", action="store_true")
    args = parser.parse_args()
    with httpx.Client(timeout=120, verify=False) as client:
        for worker in args.worker:
            client.post(f"{worker}/flush_cache", params={"timeout": 10}).raise_for_status()
        before = [served(client, worker) for worker in args.worker]
        ask = complete if args.completions else generate
        with ThreadPoolExecutor(args.parallel) as pool:
            replies = list(pool.map(functools.partial(ask, client, args.router), prompts(args.groups, args.rounds, args.words)))
        num_tokens, num_cached = (sum(column) for column in zip(*replies, strict=True))
        counts = [served(client, worker) - count for worker, count in zip(args.worker, before, strict=True)]
    print(f"{num_cached} of {num_tokens} prompt tokens cached ({num_cached / num_tokens:.1%}); requests by worker: {counts}")


if __name__ == "__main__":
    main()
