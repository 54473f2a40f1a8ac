"""`bench startup`: what a start takes, with an empty cache of programs and with a full one.

Seconds from the command to /ready, to the first answer (POST /generate, one token), and to when all programs are there; then
what the parts of it took in the scheduler process, some of them at once.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from jaxserve.bench.live_server import serve

_ONE_TOKEN = {"text": "Once upon a time", "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
_POLL_S = 0.2


@dataclasses.dataclass(frozen=True)
class Start:
    ready_s: float
    first_answer_s: float
    fully_warm_s: float
    compiles: int  # in the server's process
    parts_s: dict[str, float]


def start(cache: str, options: Sequence[str]) -> Start:
    """A server with these options of `jaxserve serve` and this cache folder. RuntimeError if it ends before it is ready."""
    started_s = time.perf_counter()
    with serve("--compilation-cache-dir", cache, "--warmup", "auto", *options) as server:
        server.post(server.connect(), "/generate", _ONE_TOKEN)
        answered_s = time.perf_counter() - started_s
        while not (state := server.state()["runner"])["fully_warm"]:
            time.sleep(_POLL_S)
        return Start(server.ready_s, answered_s, time.perf_counter() - started_s, state["compiles_total"], state["startup_s"])
