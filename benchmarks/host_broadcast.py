"""What sending steps to other hosts costs host 0: microseconds for a step, and bytes for each host.

    python -m benchmarks.host_broadcast [--hosts 2 4 8]

The followers read and decode in processes of their own on this machine and run nothing: what is measured is the scheduler
thread's share, encoding and handing over, and that the frames arrive. Steps as a server's: a decode step, one with masks of a
grammar for each row, and a prefill step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Sequence

import numpy as np

from jaxserve.hosts import Follower, Hello, Leader
from jaxserve.hosts.protocol import Forward, Sample, StepMessage, numbered
from jaxserve.hosts.sockets import HostAddress
from jaxserve.runner import PageUpdates, StepInput
from jaxserve.types import ForwardMode

SECRET = b"of this benchmark"
ROWS, PROMPT_TOKENS, VOCABULARY = 64, 8192, 152_000
STEPS = 400


def hello(rank: int) -> Hello:
    return Hello(rank=rank, name="here", software="", options={}, weights="")


def follow(address: HostAddress, rank: int) -> None:
    follower = Follower(address, hello(rank), SECRET)
    follower.join(30.0)
    ended = multiprocessing.Event()
    follower.watch(lambda reason: ended.set())
    follower.start_steps()
    while not ended.is_set():
        follower.receive(0.05)


def a_step(mode: ForwardMode, extend_lens: np.ndarray, num_decode_rows: int, num_ids: int) -> StepInput:
    rows = np.arange(len(extend_lens), dtype=np.int32)
    return StepInput(
        mode=mode,
        rows=rows,
        seq_lens=rows + 1000,
        extend_lens=extend_lens.astype(np.int32),
        num_decode_rows=num_decode_rows,
        input_ids=np.arange(num_ids, dtype=np.int32),
        sample=np.ones(len(rows), bool),
        page_updates=PageUpdates.of(rows, rows, rows),
        new_rows=[],
        needs_sampling=True,
        needs_adjusting=False,
        needs_logprobs=False,
        needs_top_logprobs=False,
    )


def cases() -> dict[str, list[StepMessage]]:
    decode = Forward(step=a_step(ForwardMode.DECODE, np.ones(ROWS), ROWS, 0))
    prefill = Forward(step=a_step(ForwardMode.EXTEND, np.full(8, PROMPT_TOKENS // 8), 0, PROMPT_TOKENS))
    masks = np.zeros((ROWS, 1, VOCABULARY // 32), np.int32)
    return {
        f"decode, {ROWS} rows": [decode, Sample()],
        f"decode, {ROWS} rows with grammars": [decode, Sample(masks=masks)],
        f"prefill, {PROMPT_TOKENS} tokens": [prefill, Sample()],
    }


def measure(num_hosts: int, address: HostAddress) -> dict[str, float]:
    """Median microseconds that a step takes host 0's scheduler thread, by case."""
    processes = [multiprocessing.Process(target=follow, args=(address, rank)) for rank in range(1, num_hosts)]
    leader = Leader(address, hello(0), num_hosts, SECRET)
    for process in processes:
        process.start()
    leader.gather(60.0, lambda reason: print(reason))
    leader.wait_joined()
    found = {}
    for name, messages in cases().items():
        took_us = []
        for _ in range(STEPS):
            started_ns = time.perf_counter_ns()
            for message in messages:
                leader.send(message)
            took_us.append((time.perf_counter_ns() - started_ns) / 1e3)
            time.sleep(0.005)  # a step
        found[name] = statistics.median(took_us)
    leader.end("")
    for process in processes:
        process.join()
    return found


def main(hosts: Sequence[int], port: int) -> None:
    print("| step | KB for each host | " + " | ".join(f"{count} hosts" for count in hosts) + " |")
    print("|---|--:|" + "--:|" * len(hosts))
    results = [measure(count, HostAddress("127.0.0.1", port)) for count in hosts]
    for name, messages in cases().items():
        size = sum(len(numbered(0, message)) for message in messages) / 1e3
        print(f"| {name} | {size:.1f} | " + " | ".join(f"{result[name]:.0f} us" for result in results) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--port", type=int, default=17730)
    options = parser.parse_args()
    main(options.hosts, options.port)
