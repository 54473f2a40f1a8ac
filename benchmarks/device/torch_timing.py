"""Times of torch functions: CUDA events around replays of a CUDA graph, as JAX's loops have no host between calls either."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.device.case import NotHereError, Setting

REPEATS = 7
LOOP_MS = 6.0
MOST_CALLS = 256


def torch_cuda(setting: Setting) -> Any:
    """torch, if it is installed and finds a GPU; NotHereError otherwise."""
    try:
        import torch
    except ImportError as error:
        raise NotHereError("torch is not installed") from error
    setting.needs_cuda()
    if not torch.cuda.is_available():
        raise NotHereError("torch finds no CUDA device")
    return torch


def time_torch(calls: Sequence[Callable[[], Any]]) -> dict[str, Any]:
    """Microseconds per call. `calls` do the same on different copies of the data, so that none finds the L2 warm."""
    import torch

    with torch.inference_mode():
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        rounds = _rounds(calls)
        replay, is_graph = _replay(calls, rounds)
        replay()
        samples = [_event_ms(replay) * 1e3 / (rounds * len(calls)) for _ in range(REPEATS)]
    return {
        "us": round(statistics.median(samples), 3),
        "us_min": round(min(samples), 3),
        "us_max": round(max(samples), 3),
        "calls": rounds * len(calls),
        "repeats": REPEATS,
        "cuda_graph": is_graph,
    }


def _rounds(calls: Sequence[Callable[[], Any]]) -> int:
    """How often to go through all calls, to last LOOP_MS."""
    once_ms = max(_event_ms(lambda: [call() for call in calls]), 1e-3)
    return max(1, min(int(LOOP_MS / once_ms), MOST_CALLS // len(calls)))


def _replay(calls: Sequence[Callable[[], Any]], rounds: int) -> tuple[Callable[[], Any], bool]:
    """A function that does everything, from a CUDA graph if the calls can be captured."""
    import torch

    def everything() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            everything()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError:
        torch.cuda.synchronize()
        return everything, False
    return graph.replay, True


def _event_ms(run: Callable[[], Any]) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))
