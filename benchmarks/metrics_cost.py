"""What metrics cost: two servers around the same timed device, one with metrics and one without, loaded in turns.

    python -m benchmarks.metrics_cost [--rounds 8] [--tokens 400] [--step-s 0.004 0.0]

256 streaming clients, as in `benchmarks.streaming`. With --step-s 0.004 the device is the limit, as on an accelerator; with 0
it costs nothing, and the host's own work is all there is. The server with metrics is scraped once a second, which is more than
Prometheus asks. Which of the two goes first changes from round to round. Prints tokens per second and CPU time of all processes
per token, of each round and the ratio of their medians, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import urllib.request
from collections.abc import Iterator

from benchmarks.streaming import TimedServer, measure, serving
from benchmarks.timed_device import MAX_ROWS

_SCRAPE_EVERY_S = 1.0


@contextlib.contextmanager
def scraped(server: TimedServer) -> Iterator[list[int]]:
    """Scrapes it until the end; the sizes of what came."""
    is_over, sizes = threading.Event(), list[int]()

    def work() -> None:
        while not is_over.wait(_SCRAPE_EVERY_S):
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as reply:
                sizes.append(len(reply.read()))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield sizes
    finally:
        is_over.set()
        thread.join()


def once(server: TimedServer, step_s: float, num_tokens: int, *, is_on: bool) -> tuple[float, float]:
    """Tokens per second, and CPU microseconds of the server's processes per token."""
    load = {"api": "native", "step_s": max(step_s, 1e-3), "num_clients": MAX_ROWS, "num_tokens": num_tokens}
    with scraped(server) if is_on else contextlib.nullcontext():
        result = measure(server, **load)
    cpu_s = sum(result["cpu_s"][name] for name in ("main", "scheduler", "detokenizer"))
    return result["tokens_per_s"], cpu_s / (MAX_ROWS * num_tokens) * 1e6


def compare(step_s: float, num_rounds: int, num_tokens: int) -> None:
    options = {"incremental_streaming_output": True}
    speeds: dict[bool, list[float]] = {True: [], False: []}
    costs: dict[bool, list[float]] = {True: [], False: []}
    with serving(step_s, enable_metrics=True, **options) as on, serving(step_s, enable_metrics=False, **options) as off:
        servers = {True: on, False: off}
        for is_on in servers:
            once(servers[is_on], step_s, num_tokens, is_on=is_on)  # warms up
        for number in range(num_rounds):
            for is_on in (True, False) if number % 2 else (False, True):
                speed, cost = once(servers[is_on], step_s, num_tokens, is_on=is_on)
                speeds[is_on].append(speed)
                costs[is_on].append(cost)
            print(
                f"  round {number}: {speeds[False][-1]:>9,.0f} tok/s without, {speeds[True][-1]:>9,.0f} with; "
                f"{costs[False][-1]:6.2f} us of CPU per token without, {costs[True][-1]:6.2f} with",
                flush=True,
            )
    for what, values in (("tokens per second", speeds), ("CPU per token", costs)):
        ratios = [one / other for one, other in zip(values[True], values[False], strict=True)]
        medians = {is_on: statistics.median(values[is_on]) for is_on in values}
        print(
            f"{step_s * 1e3:g} ms steps, {what}: {medians[True]:,.2f} with, {medians[False]:,.2f} without: "
            f"ratio {medians[True] / medians[False]:.4f}; of the rounds, median {statistics.median(ratios):.4f}, "
            f"{min(ratios):.3f} to {max(ratios):.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each")
    parser.add_argument("--tokens", type=int, default=400, help="new tokens of a request")
    parser.add_argument("--step-s", type=float, nargs="+", default=[0.004, 0.0], help="times of a device step")
    args = parser.parse_args()
    for step_s in args.step_s:
        compare(step_s, args.rounds, args.tokens)


if __name__ == "__main__":
    main()
