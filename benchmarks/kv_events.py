"""What KV cache events cost the scheduler: a request's life in the prefix cache without events and with them.

    python -m benchmarks.kv_events [--page-sizes 1,16,64] [--prompt-tokens 8192] [--repeats 200]

Each prompt is new, and evicts another one's pages, so that a life is as many pages stored as removed. Both caches take turns.
With events the life includes handing them to a publisher with one subscriber on this machine. Prints medians in microseconds:
of a life, what events add to one page, and what the publisher's thread takes to encode that page.
"""

from __future__ import annotations

import argparse
import platform
import time

import msgspec
import numpy as np
import zmq

from benchmarks.radix import Prompts, whole_life
from jaxserve.cache import CacheManager
from jaxserve.config import KVEventsConfig
from jaxserve.runner import KVGroup
from jaxserve.server.kv_events import KVEventBatch, KVEventPublisher

_ENDPOINT = "ipc:///tmp/jaxserve-bench-kv-events-{}.ipc"
_PROMPTS_IN_CACHE = 8


def full_cache(page_size: int, prompts: Prompts, *, record_events: bool) -> CacheManager:
    pages_per_prompt = prompts.num_tokens // page_size + 1
    cache = CacheManager(
        groups=(KVGroup(_PROMPTS_IN_CACHE * pages_per_prompt),),
        page_size=page_size,
        max_rows=8,
        max_pages_per_row=pages_per_prompt,
        record_events=record_events,
    )
    for _ in range(_PROMPTS_IN_CACHE + 1):
        whole_life(cache, prompts.fresh())
    cache.take_events()
    return cache


def life_us(cache: CacheManager, prompt: np.ndarray, publisher: KVEventPublisher | None) -> float:
    began_s = time.perf_counter()
    whole_life(cache, prompt)
    if publisher is not None:
        publisher.publish(cache.take_events())
    return (time.perf_counter() - began_s) * 1e6


def encoding_us(cache: CacheManager, prompt: np.ndarray) -> float:
    encoder = msgspec.msgpack.Encoder()
    whole_life(cache, prompt)
    batch = KVEventBatch(time.time(), cache.take_events(), 0)
    began_s = time.perf_counter()
    encoder.encode(batch)
    return (time.perf_counter() - began_s) * 1e6


def compare(page_size: int, num_tokens: int, repeats: int) -> None:
    prompts = Prompts(num_tokens)
    without, recording = (full_cache(page_size, prompts, record_events=is_on) for is_on in (False, True))
    endpoint = _ENDPOINT.format(page_size)
    publisher = KVEventPublisher(KVEventsConfig(endpoint=endpoint))
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(endpoint)
    took: dict[bool, list[float]] = {False: [], True: []}
    for i in range(repeats):
        for is_on in (True, False) if i % 2 else (False, True):
            time.sleep(0.005)  # as between two steps: the thread has sent the batch before
            took[is_on].append(life_us(recording if is_on else without, prompts.fresh(), publisher if is_on else None))
    encoding = [encoding_us(recording, prompts.fresh()) for _ in range(20)]
    publisher.close()
    subscriber.close(linger=0)
    off, on = float(np.median(took[False])), float(np.median(took[True]))
    pages = num_tokens // page_size
    print(
        f"page_size {page_size:3}  {pages:5} pages  life {off:8.1f} without, {on:8.1f} with; "
        f"a page {(on - off) / pages:6.3f} more, its encoding {float(np.median(encoding)) / pages:6.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the prefix cache with and without KV cache events.")
    parser.add_argument("--page-sizes", default="1,16,64", help="Comma-separated tokens per page.")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}; medians in us")
    for page_size in map(int, args.page_sizes.split(",")):
        compare(page_size, args.prompt_tokens, args.repeats)


if __name__ == "__main__":
    main()
