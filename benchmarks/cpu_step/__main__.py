"""Step times of a 129M model on this CPU: ours, Transformers' and llama.cpp's, in turns.

    python -m benchmarks.cpu_step [--cases decode] [--rounds 5] [--llama-python VENV/bin/python] [--only ours]

A prompt of 2048 tokens, and decode steps of 1, 8 and 32 rows with 256 to 1024 tokens in their cache. The runner is called
directly, so neither a scheduler nor HTTP is in the times. All in float32, with as many threads as there are cores. llama.cpp
runs in an interpreter of its own that has llama-cpp-python, gguf and safetensors (`llama.py`). Prints the medians, and ratios
above 1 where we are faster: medians over the rounds of their time over ours.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
from typing import Protocol

from benchmarks.cpu_step.cases import CASES, PROMPT_LEN
from benchmarks.cpu_step.ours import Jaxserve
from benchmarks.medium_model import MEDIUM_QWEN3, write_medium_qwen3


class Contender(Protocol):
    def seconds(self, case: str) -> float: ...


class LlamaCpp:
    """A child that answers a case with its seconds."""

    def __init__(self, python: str, model: str) -> None:
        command = [python, str(pathlib.Path(__file__).parent / "llama.py"), model, str(os.cpu_count())]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, text=True)
        assert self._read() == "ready", f"{' '.join(command)} did not start"

    def seconds(self, case: str) -> float:
        assert self._child.stdin
        self._child.stdin.write(f"{case}\n")
        self._child.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self._child.stdout
        return self._child.stdout.readline().strip()


def contenders(options: argparse.Namespace, model: str) -> dict[str, Contender]:
    found: dict[str, Contender] = {"jaxserve": Jaxserve(model, dtype=options.dtype)}
    if options.only == "ours":
        return found
    from benchmarks.cpu_step.theirs import Transformers

    found["Transformers"] = Transformers(model)
    if options.llama_python:
        found["llama.cpp"] = LlamaCpp(options.llama_python, model)
    return found


def describe(case: str, times: dict[str, list[float]]) -> str:
    parts = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        amount = f"{PROMPT_LEN / median:6.0f} tok/s" if case == "prefill" else f"{median * 1e3:6.1f} ms"
        ratio = statistics.median(theirs / ours for theirs, ours in zip(seconds, times["jaxserve"], strict=True))
        parts.append(f"{name} {amount}" + ("" if name == "jaxserve" else f" (ratio {ratio:.2f})"))
    return f"{case:10s} " + "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, default=MEDIUM_QWEN3)
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--llama-python", help="interpreter that has llama-cpp-python, gguf and safetensors")
    parser.add_argument("--only", choices=("ours",))
    options = parser.parse_args()
    timed = contenders(options, str(write_medium_qwen3(options.model)))
    for case in CASES:
        if options.cases not in case:
            continue
        for contender in timed.values():
            contender.seconds(case)
        times: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(options.rounds):
            for name, contender in timed.items():
                times[name].append(contender.seconds(case))
        print(describe(case, times), flush=True)


if __name__ == "__main__":
    main()
