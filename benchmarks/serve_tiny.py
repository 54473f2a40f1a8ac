"""Benchmark (a): output tokens per second of /generate on a tiny Qwen3, 4 clients at once.

    python -m benchmarks.serve_tiny [--clients 4] [--requests 200] [-- any option of jaxserve serve]

25-token prompts, 64 output tokens, not streamed. On such a model the host is what is measured: a bare jitted step takes
well under a millisecond. Prints the median and the best of several rounds, and the milliseconds per decode step.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import statistics
import tempfile
import threading
import time

from benchmarks.tiny_model import write_tiny_qwen3
from jaxserve.bench.live_server import Server, serve

PROMPT_LEN, OUTPUT_LEN = 25, 64


def client(server: Server, count: int, seed: int) -> None:
    connection, rng = server.connect(), random.Random(seed)
    for _ in range(count):
        body = {
            "input_ids": [rng.randrange(256) for _ in range(PROMPT_LEN)],
            "sampling_params": {"temperature": 0, "max_new_tokens": OUTPUT_LEN, "ignore_eos": True},
        }
        reply = server.post(connection, "/generate", body)
        assert reply["meta_info"]["completion_tokens"] == OUTPUT_LEN


def one_round(server: Server, clients: int, requests: int, seed: int) -> float:
    """Seconds for all requests."""
    threads = [threading.Thread(target=client, args=(server, requests // clients, seed * 1000 + i)) for i in range(clients)]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options, server_options = parser.parse_known_args()
    server_options = [option for option in server_options if option != "--"]
    requests = options.requests // options.clients * options.clients
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_qwen3(pathlib.Path(folder) / "tiny-qwen3")
        with serve("--model-path", str(model), "--load-format", "dummy", *server_options) as server:
            one_round(server, options.clients, requests, 0)
            rates = [requests * OUTPUT_LEN / one_round(server, options.clients, requests, i + 1) for i in range(options.rounds)]
            compiles = server.state()["runner"]["compiles_after_ready_total"]
    median = statistics.median(rates)
    step_ms = 1000 * options.clients / median
    print(f"{options.clients} clients, {requests} requests a round, {PROMPT_LEN} tokens in, {OUTPUT_LEN} out")
    print(f"output tok/s: median {median:.0f}, best {max(rates):.0f}, worst {min(rates):.0f} of {options.rounds} rounds")
    print(f"{step_ms:.2f} ms per step of {options.clients} tokens, prefill included; compiles after ready: {compiles}")


if __name__ == "__main__":
    main()
