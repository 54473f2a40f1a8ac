"""Benchmark (d): what a start takes, with an empty cache of programs and with a full one.

    python -m benchmarks.startup [--model-path FOLDER] [--runs 3] [-- any option of jaxserve serve]

Seconds from the command to /ready, to the first answer (POST /generate, one token), and to when all programs are there; then
what the parts of it took in the scheduler process, some of them at once. The demo model, or any folder (medium_model.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time

from benchmarks.server import serve
from jaxserve.demo import demo_model_path

_ONE_TOKEN = {"text": "Once upon a time", "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
_POLL_S = 0.2


@dataclasses.dataclass(frozen=True)
class Start:
    ready_s: float
    first_answer_s: float
    fully_warm_s: float
    compiles: int  # in the server's process
    parts_s: dict[str, float]

    def __str__(self) -> str:
        parts = ", ".join(f"{what} {took_s:.1f}" for what, took_s in self.parts_s.items())
        return (
            f"ready {self.ready_s:.1f} s, first answer {self.first_answer_s:.1f} s, fully warm {self.fully_warm_s:.1f} s; "
            f"{self.compiles} compiled in the server ({parts})"
        )


def start(cache: str, options: list[str]) -> Start:
    started_s = time.perf_counter()
    with serve("--compilation-cache-dir", cache, "--warmup", "auto", *options) as server:
        server.post(server.connect(), "/generate", _ONE_TOKEN)
        answered_s = time.perf_counter() - started_s
        while not (state := server.state()["runner"])["fully_warm"]:
            time.sleep(_POLL_S)
        return Start(server.ready_s, answered_s, time.perf_counter() - started_s, state["compiles_total"], state["startup_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default=demo_model_path())
    parser.add_argument("--runs", type=int, default=3)
    options, server_options = parser.parse_known_args()
    server_options = ["--model-path", options.model_path, *(option for option in server_options if option != "--")]
    with tempfile.TemporaryDirectory() as cache:
        print(f"cold: {start(cache, server_options)}", flush=True)
        warm = [start(cache, server_options) for _ in range(options.runs)]
    for one in warm:
        print(f"warm: {one}")
    medians = [statistics.median(getattr(one, f"{what}_s") for one in warm) for what in ("ready", "first_answer", "fully_warm")]
    print("warm, medians: ready {:.1f} s, first answer {:.1f} s, fully warm {:.1f} s".format(*medians))


if __name__ == "__main__":
    main()
