"""What metrics cost: two servers around the same timed device, one with metrics and one without, under the same load.

    python -m benchmarks.metrics_cost [--rounds 10] [--tokens 400] [--step-s 0.004] [--in-turns]

Both are loaded at the same time, each by 128 streaming clients as in `benchmarks.streaming`, so that whatever else the machine
does meets both; with --in-turns one after the other, by 256. The one with metrics is scraped every 5 s; Prometheus asks every
15 s. Which of the two starts first changes from round to round, and so does which is which: each pair of servers serves two
rounds. Prints tokens per second, and CPU time of all the server's processes per token, of each round; then the ratio
with to without, the mean of the rounds with its 95 % confidence interval.

    python -m benchmarks.metrics_cost --in-process

The code alone: scheduler, detokenizer and the main process's table of live requests in one thread, 256 rows, a step after the
other with metrics and without in turns. Prints the CPU time that metrics add to a token.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.streaming import TimedServer, measure, serving
from benchmarks.timed_device import MAX_ROWS
from jaxserve.bench.scheduler import ConstantRunner
from jaxserve.config import ServerArgs
from jaxserve.messages import BatchStrOut, BatchTokenIDOut, DetokenizerInput, Message, TokenizedGenerateReqInput, TokenizerInput
from jaxserve.metrics import Registry
from jaxserve.runner import KVGroup, RunnerSpec
from jaxserve.scheduler.loop import SchedulerLoop
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.server.live_requests import CallFacts, LiveCall, LiveSequence, LiveTable
from jaxserve.server.metrics import TokenGaps
from jaxserve.server.requests import GenerationChunk
from jaxserve.types import SamplingParams

_SCRAPE_EVERY_S = 5.0
_BLOCK_STEPS = 8


# --- two servers


@contextlib.contextmanager
def scraped(server: TimedServer) -> Iterator[None]:
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(_SCRAPE_EVERY_S):
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as reply:
                reply.read()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def once(server: TimedServer, step_s: float, num_clients: int, num_tokens: int, *, is_on: bool) -> tuple[float, float]:
    """Tokens per second, and CPU microseconds of the server's processes per token."""
    load = {"api": "native", "step_s": step_s, "num_clients": num_clients, "num_tokens": num_tokens}
    with scraped(server) if is_on else contextlib.nullcontext():
        result = measure(server, **load)
    cpu_s = sum(result["cpu_s"][name] for name in ("main", "scheduler", "detokenizer"))
    return result["tokens_per_s"], cpu_s / (num_clients * num_tokens) * 1e6


def both(
    servers: dict[bool, TimedServer], order: Sequence[bool], step_s: float, num_tokens: int, *, in_turns: bool
) -> dict[bool, tuple[float, float]]:
    if in_turns:
        return {is_on: once(servers[is_on], step_s, MAX_ROWS, num_tokens, is_on=is_on) for is_on in order}
    with ThreadPoolExecutor(2) as pool:
        running = {is_on: pool.submit(once, servers[is_on], step_s, MAX_ROWS // 2, num_tokens, is_on=is_on) for is_on in order}
        return {is_on: future.result() for is_on, future in running.items()}


def compare_servers(step_s: float, num_rounds: int, num_tokens: int, *, in_turns: bool) -> None:
    results: list[dict[bool, tuple[float, float]]] = []
    for pair in range(num_rounds // 2):
        first = bool(pair % 2)
        with (
            serving(step_s, enable_metrics=first, incremental_streaming_output=True) as one,
            serving(step_s, enable_metrics=not first, incremental_streaming_output=True) as other,
        ):
            servers = {first: one, not first: other}
            both(servers, (True, False), step_s, num_tokens // 4, in_turns=in_turns)  # warms up
            for order in ((True, False), (False, True)):
                found = both(servers, order, step_s, num_tokens, in_turns=in_turns)
                results.append(found)
                print(
                    f"  {found[False][0]:>9,.0f} tok/s without, {found[True][0]:>9,.0f} with; "
                    f"{found[False][1]:6.2f} us of CPU per token without, {found[True][1]:6.2f} with",
                    flush=True,
                )
    for at, what in enumerate(("tokens per second", "CPU per token")):
        logs = [math.log(found[True][at] / found[False][at]) for found in results]
        mean, error = statistics.mean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
        low, middle, high = (math.exp(value) for value in (mean - error, mean, mean + error))
        print(f"{what}, with to without: {middle:.4f} ({low:.4f} to {high:.4f})", flush=True)


# --- the code alone


class _Outputs:
    """A transport that keeps what the scheduler sends on."""

    def __init__(self) -> None:
        self.outputs: list[BatchTokenIDOut] = []
        self.messages: list[Message] = []

    def recv_messages(self, timeout_s: float | None) -> Sequence[Message]:
        messages, self.messages = self.messages, []
        return messages

    def send_output(self, message: DetokenizerInput) -> None:
        if isinstance(message, BatchTokenIDOut):
            self.outputs.append(message)

    def send_reply(self, message: TokenizerInput) -> None:
        pass


class _Nowhere:
    def push(self, chunk: GenerationChunk) -> None:
        pass

    def end(self) -> None:
        pass


class HostPath:
    """What the host does for a step, in one thread: all but sockets, HTTP and text."""

    def __init__(self, num_steps: int, *, is_on: bool) -> None:
        context_len = num_steps + 200
        spec = RunnerSpec(
            page_size=16, kv_groups=(KVGroup(MAX_ROWS * (context_len + 16) // 16 + 1),), max_rows=MAX_ROWS,
            context_len=context_len, max_step_tokens=16384, vocab_size=32000, hidden_size=8, eos_token_ids=(2,),
            max_top_logprobs=20,
        )  # fmt: skip
        args = ServerArgs(schedule_conservativeness=0.0, enable_metrics=is_on)
        self._transport = _Outputs()
        self._loop = SchedulerLoop(Scheduler(args, ConstantRunner(spec), decoder=None, sink=self._transport), self._transport)
        self._gaps = TokenGaps(Registry("main").histogram("inter_token_latency_seconds").observe_many) if is_on else None
        self._table = LiveTable()
        for i in range(MAX_ROWS):
            ids = np.full(64, 3 + i, np.int32)
            params = SamplingParams(max_new_tokens=num_steps + 100)
            message = TokenizedGenerateReqInput(rid=f"r{i}", input_ids=ids, sampling_params=params, stream=True)
            self._transport.messages.append(message)
            facts = CallFacts(0.0)
            sequence = LiveSequence(f"r{i}", 0, facts, LiveCall(_Nowhere(), 1, facts), sent=True)
            sequence.gaps = None if self._gaps is None else self._gaps.buffer(())
            self._table.add(sequence)

    def step(self) -> None:
        self._loop.step()
        outputs, self._transport.outputs = self._transport.outputs, []
        for out in outputs:
            self._table.route(
                BatchStrOut(
                    rids=out.rids, texts=["x"] * len(out.rids), token_ids=out.token_ids, token_counts=out.token_counts,
                    prompt_tokens=out.prompt_tokens, completion_tokens=out.completion_tokens, cached_tokens=out.cached_tokens,
                )
            )  # fmt: skip
            if self._gaps is not None:
                self._gaps.settle()


def compare_code(num_blocks: int) -> None:
    paths = {is_on: HostPath((num_blocks + 4) * _BLOCK_STEPS, is_on=is_on) for is_on in (True, False)}
    for path in paths.values():
        for _ in range(4 * _BLOCK_STEPS):
            path.step()
    took: dict[bool, list[float]] = {True: [], False: []}
    for block in range(num_blocks):
        for is_on in (True, False) if block % 2 else (False, True):
            step = paths[is_on].step
            began_s = time.thread_time()
            for _ in range(_BLOCK_STEPS):
                step()
            took[is_on].append((time.thread_time() - began_s) / (_BLOCK_STEPS * MAX_ROWS) * 1e6)
    added = [one - other for one, other in zip(took[True], took[False], strict=True)]
    low, middle, high = np.percentile(added, (25, 50, 75))
    print(
        f"us of CPU per token, without sockets, HTTP and text: {statistics.median(took[False]):.3f} without metrics, "
        f"{statistics.median(took[True]):.3f} with; added {middle:.3f} (quartiles {low:.3f}, {high:.3f}; {num_blocks} blocks)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="rounds, two with each pair of servers")
    parser.add_argument("--tokens", type=int, default=400, help="new tokens of a request")
    parser.add_argument("--step-s", type=float, default=0.004, help="time of a device step")
    parser.add_argument("--in-turns", action="store_true", help="one server at a time")
    parser.add_argument("--in-process", action="store_true", help="the code alone")
    parser.add_argument("--blocks", type=int, default=400, help="in process: blocks of steps of each")
    args = parser.parse_args()
    if args.in_process:
        compare_code(args.blocks)
    else:
        compare_servers(args.step_s, args.rounds, args.tokens, in_turns=args.in_turns)


if __name__ == "__main__":
    main()
