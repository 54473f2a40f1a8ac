"""What samples cost as arrays (`Engine.rollout`) and as replies (`Engine.generate`): 512 prompts, 8 samples of each.

    python -m benchmarks.rollouts [--prompts 512] [--samples 8] [--tokens 128] [--rounds 3] [--no-logprobs]
    python -m benchmarks.rollouts --model demo --tokens 16 [--in-process]        a model on this machine's device
    python -m benchmarks.rollouts --model demo --kv [--prompt-tokens 1800] [--prompts 1] [--samples 32] [--tokens 16]

Without a model the device costs the host nothing and takes no time, so that what is left is the engine's own work: the real
scheduler, detokenizer and main process. Both are asked in turns. Prints, as medians of rounds: tokens per second by the clock,
the CPU time of each process for a token, and generate's over rollout's in the same round.

With --kv: how many tokens of the prompts are computed, and how many tokens the KV cache holds at most, beside what it takes if
each prompt is there once.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import psutil

from benchmarks.timed_device import TimedRunner, _Launched, timed_spec
from jaxserve import Engine
from jaxserve.bench.simulate import LinearStepTimes, evenly
from jaxserve.demo import demo_model_path
from jaxserve.messages import DETOKENIZER, SCHEDULER
from jaxserve.runner import StepOutput
from jaxserve.server.decoder_handover import wait_for_decoder
from jaxserve.server.process_worker import WorkerCommand
from jaxserve.server.scheduler_process import TailDecoder, open_publisher, serve
from jaxserve.server.worker_process import WorkerContext, run_worker

_LOOK_EVERY_S = 0.005


class ScoringRunner(TimedRunner):
    """Tokens come with logprobs."""

    def fetch(self, handle: _Launched) -> StepOutput:
        output = super().fetch(handle)
        return dataclasses.replace(output, logprobs=np.full(output.token_ids.shape, -0.5, np.float32))


def work(context: WorkerContext) -> None:
    publisher = open_publisher(context)
    times = LinearStepTimes(step_s=0.0)
    runner = ScoringRunner(timed_spec(context.args, times), evenly(times, 1))
    serve(context, context.args, runner, TailDecoder(wait_for_decoder(context)), publisher=publisher)


class Sample(NamedTuple):
    """One run."""

    tokens_per_s: float
    cpu_us: dict[str, float]  # per token; by process


def measure(engine: Engine, kind: str, prompts: list[str], num_samples: int, num_tokens: int, *, logprobs: bool) -> Sample:
    params = {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True, "n": num_samples}
    children = [psutil.Process(pid) for pid in engine.get_all_child_pids() if pid != os.getpid()]
    before, main_s, began_s = [_cpu_s(child) for child in children], time.process_time(), time.perf_counter()
    if kind == "rollout":
        count = int(engine.rollout(prompts, params, logprobs=logprobs).lengths.sum())
    else:
        replies: Any = engine.generate(prompts, params, return_logprob=logprobs)
        count = sum(len(reply["output_ids"]) for reply in replies)
    took_s, main_s = time.perf_counter() - began_s, time.process_time() - main_s
    cpu_s = {"main": main_s}
    for child, child_s in zip(children, before, strict=True):
        cpu_s[_kind_of(child)] = _cpu_s(child) - child_s
    assert count == len(prompts) * num_samples * num_tokens, f"{count} tokens came"
    return Sample(count / took_s, {name: spent_s / count * 1e6 for name, spent_s in cpu_s.items()})


def _cpu_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def _kind_of(process: psutil.Process) -> str:
    return DETOKENIZER if any("detokenizer" in word for word in process.cmdline()) else SCHEDULER


def report(samples: dict[str, list[Sample]]) -> None:
    for kind, runs in samples.items():
        names = runs[0].cpu_us
        cpu = "  ".join(f"{name} {statistics.median(run.cpu_us[name] for run in runs):.2f}" for name in names)
        print(f"{kind:<10}{statistics.median(run.tokens_per_s for run in runs):>10,.0f} tok/s   us of CPU per token: {cpu}")
    rounds = list(zip(samples["generate"], samples["rollout"], strict=True))
    main = statistics.median(one.cpu_us["main"] / other.cpu_us["main"] for one, other in rounds)
    clock = statistics.median(other.tokens_per_s / one.tokens_per_s for one, other in rounds)
    print(
        f"generate's CPU in the main process is {main:.1f} times rollout's; rollout is {clock:.2f} times as fast by the clock"
    )


def compare(engine: Engine, options: argparse.Namespace) -> None:
    prompts = [f"asks what {i} and {7 * i % 31} of the boats on the river carry." for i in range(options.prompts or 512)]
    asked: dict[str, Any] = {"num_samples": options.samples or 8, "logprobs": not options.no_logprobs}
    samples: dict[str, list[Sample]] = {"generate": [], "rollout": []}
    for kind in samples:  # warms up
        measure(engine, kind, prompts[:16], num_tokens=8, **asked)
    for _ in range(options.rounds):
        for kind, runs in samples.items():
            runs.append(measure(engine, kind, prompts, num_tokens=options.tokens or 128, **asked))
    report(samples)


def count_kv(engine: Engine, options: argparse.Namespace) -> None:
    count, n, length, new = options.prompts or 1, options.samples or 32, options.prompt_tokens, options.tokens or 16
    prompts = np.random.default_rng(0).integers(300, 1900, (count, length), np.int32)
    params = {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True}
    page_size, before = state(engine)["page_size"], state(engine)["prefill_tokens"]
    held, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(_LOOK_EVERY_S):
            held.append(state(engine)["num_used_tokens"])

    looker = threading.Thread(target=look)
    looker.start()
    engine.rollout(input_ids=list(prompts), sampling_params=params, n=n)
    done.set()
    looker.join()
    shared = (length - 1) // page_size * page_size
    own = -(-(length + new - 1) // page_size) * page_size - shared  # the last token is never written
    print(
        f"{count} prompts of {length} tokens, {n} samples of {new} tokens, pages of {page_size}\n"
        f"computed {state(engine)['prefill_tokens'] - before:>9,} tokens of prompts; each prompt once: "
        f"{count * length:,}, and what samples cannot share of a page: {count * (n - 1) * (length - shared):,}\n"
        f"held     {max(held):>9,} tokens at most; each prompt's whole pages once, the rest of each sample: "
        f"{count * (shared + n * own):,}"
    )


def state(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    return found


def main() -> int:
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        return run_worker(SCHEDULER, work)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--samples", type=int, help="of each prompt")
    parser.add_argument("--tokens", type=int, help="of each sample")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-logprobs", action="store_true")
    parser.add_argument("--model", help="a folder, or demo; default: a device that costs nothing")
    parser.add_argument("--in-process", action="store_true", help="with --model: all of it on threads of the main process")
    parser.add_argument("--kv", action="store_true", help="count tokens that are computed and held")
    parser.add_argument("--prompt-tokens", type=int, default=1800, help="with --kv")
    parser.add_argument("--page-size", type=int, help="with --model")
    options = parser.parse_args()
    scheduler = WorkerCommand.of_module(SCHEDULER, "benchmarks.rollouts")
    detokenizer = WorkerCommand.of_module(DETOKENIZER, "jaxserve.server.detokenizer")
    commands = None if options.model else (scheduler, detokenizer)
    path, pages = options.model or demo_model_path(), {"page_size": options.page_size} if options.page_size else {}
    with Engine(path, worker_commands=commands, in_process=options.in_process, **pages) as engine:
        (count_kv if options.kv else compare)(engine, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
