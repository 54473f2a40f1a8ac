"""Benchmark (d): seconds from the command to ready, with an empty and with a warm compilation cache, on the demo model.

python -m benchmarks.startup [--runs 3] [-- any option of jaxserve serve]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

from benchmarks.server import serve
from jaxserve.demo import demo_model_path


def start_s(cache: str, options: list[str]) -> float:
    with serve("--model-path", demo_model_path(), "--compilation-cache-dir", cache, *options) as server:
        return server.ready_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    options, server_options = parser.parse_known_args()
    server_options = [option for option in server_options if option != "--"]
    with tempfile.TemporaryDirectory() as cache:
        print(f"cold: {start_s(cache, server_options):.1f} s")
        warm = [start_s(cache, server_options) for _ in range(options.runs)]
    print(f"warm: median {statistics.median(warm):.1f} s, best {min(warm):.1f} s of {options.runs} starts")


if __name__ == "__main__":
    main()
