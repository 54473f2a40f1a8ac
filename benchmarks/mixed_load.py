"""Requests of unlike lengths that arrive at random: the Engine against Transformers in static batches, on the 129M model.

    python -m benchmarks.mixed_load [--requests 40] [--batch 8] [--mean-interval-s 0.05] [--rounds 2]

Arrivals are a Poisson process, prompts have 16 to 256 tokens, outputs 8 to 96, greedy, without an end of sequence. Transformers
takes the requests in the order of arrival, `--batch` at a time: a batch starts when its last request is there and the batch
before has ended, is padded on the left and runs until its longest output is done. Prints seconds from the first arrival to the
last token, and the mean time that a request took.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import pathlib
import statistics
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.medium_model import MEDIUM_QWEN3, write_medium_qwen3
from jaxserve import Engine

PROMPT_LENS, OUTPUT_LENS = (16, 256), (8, 96)


@dataclasses.dataclass(frozen=True)
class Request:
    arrival_s: float
    prompt: list[int]
    output_len: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    total_s: float
    mean_latency_s: float


def draw(count: int, mean_interval_s: float, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(mean_interval_s, count))
    return [
        Request(
            float(arrival - arrivals[0]),
            rng.integers(10, 2000, rng.integers(*PROMPT_LENS, endpoint=True)).tolist(),
            int(rng.integers(*OUTPUT_LENS, endpoint=True)),
        )
        for arrival in arrivals
    ]


def ours(engine: Engine, requests: list[Request]) -> Outcome:
    async def one(request: Request, start_s: float) -> float:
        await asyncio.sleep(request.arrival_s)
        sampling = {"temperature": 0, "max_new_tokens": request.output_len, "ignore_eos": True}
        reply = await engine.async_generate(input_ids=request.prompt, sampling_params=sampling)
        assert reply["meta_info"]["completion_tokens"] == request.output_len
        return time.perf_counter() - start_s - request.arrival_s

    async def every() -> Outcome:
        start_s = time.perf_counter()
        latencies = await asyncio.gather(*(one(request, start_s) for request in requests))
        return Outcome(time.perf_counter() - start_s, statistics.mean(latencies))

    return asyncio.run(every())


@torch.inference_mode()
def theirs(model: AutoModelForCausalLM, requests: list[Request], batch_size: int) -> Outcome:
    start_s, latencies = time.perf_counter(), []
    for first in range(0, len(requests), batch_size):
        batch = requests[first : first + batch_size]
        time.sleep(max(0.0, batch[-1].arrival_s - (time.perf_counter() - start_s)))
        longest, new = max(len(one.prompt) for one in batch), max(one.output_len for one in batch)
        ids = torch.tensor([[0] * (longest - len(one.prompt)) + one.prompt for one in batch])
        mask = torch.tensor([[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in batch])
        model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=new, max_new_tokens=new, pad_token_id=0)
        latencies += [time.perf_counter() - start_s - one.arrival_s for one in batch]
    return Outcome(time.perf_counter() - start_s, statistics.mean(latencies))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, default=MEDIUM_QWEN3)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--mean-interval-s", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    path = str(write_medium_qwen3(options.model))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with Engine(model_path=path, disable_radix_cache=True, log_level="warning") as engine:
        ours(engine, draw(options.batch, 0.0, seed=99))
        ratios = []
        for seed in range(options.rounds):
            requests = draw(options.requests, options.mean_interval_s, seed)
            mine, other = ours(engine, requests), theirs(model, requests, options.batch)
            ratios.append(other.total_s / mine.total_s)
            for name, outcome in (("jaxserve", mine), ("Transformers", other)):
                print(f"{name:12s} {outcome.total_s:6.1f} s, a request {outcome.mean_latency_s:6.1f} s", flush=True)
    print(f"{options.requests} requests: median ratio {statistics.median(ratios):.2f}, lowest {min(ratios):.2f}")


if __name__ == "__main__":
    main()
