"""What streaming costs: 256 clients of a device that takes 4 ms a step.

    python -m benchmarks.streaming [--api native completions chat] [--rounds 3] [--tokens 800] [--step-s 0.004]
    python -m benchmarks.streaming --crowd         1,000 clients: 100 never read, 200 leave

The device is `benchmarks.timed_device`, the clients `benchmarks.streaming_client`, in a process of its own. Prints tokens per
second and what share that is of what the device gives, events per token, gaps between a client's events in steps, CPU time of
the main process per event, and what share of a core each process took. On a machine with few cores these shares add up to all
there is: then that binds, and the main process's CPU per event is the number to look at.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.timed_device import MAX_ROWS
from jaxserve.demo import demo_model_path
from jaxserve.messages import DETOKENIZER, FRONT, SCHEDULER, WorkerAddress

_STALL_TIMEOUT_S = 3.0  # so that clients that never read are met within a run
_PROCESSES = ("main", "scheduler", "detokenizer")
_KINDS = {
    "jaxserve.server.fronts.process": FRONT,
    "jaxserve.server.detokenizer": DETOKENIZER,
    "benchmarks.timed_device": SCHEDULER,
}


class TimedServer:
    def __init__(self, step_s: float, **options: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        args = {"model_path": demo_model_path(), "port": self.port, "log_level": "error", **options}
        command = [sys.executable, "-m", "benchmarks.timed_device", "serve", json.dumps(args)]
        self._process = subprocess.Popen(command, env=os.environ | {"TIMED_STEP_S": str(step_s)})
        self.main = psutil.Process(self._process.pid)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as reply:
            return json.loads(reply.read() or b"null") if "json" in reply.headers["content-type"] else None

    def wait_ready(self) -> None:
        while True:
            try:
                self.get("/ready")
                return
            except OSError:  # nobody listens, it is not ready, or too busy to say so
                if self._process.poll() is not None:
                    raise RuntimeError("the server ended before it was ready") from None
                time.sleep(0.05)

    def processes(self) -> dict[str, psutil.Process]:
        """The main process as "main", and the workers, each by its kind and, from the second of a kind on, its rank."""
        found = {"main": self.main}
        for child in self.main.children():
            module, _folder, _parent, rank, _start = child.cmdline()[-5:]
            found[str(WorkerAddress(_KINDS[module], int(rank)))] = child
        return found

    @property
    def folder(self) -> Path:
        """The server's private folder."""
        return Path(self.main.children()[0].cmdline()[-4])

    def cpu_s(self) -> dict[str, float]:
        """What each process has taken since it began."""
        return {name: sum(process.cpu_times()[:2]) for name, process in self.processes().items()}

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


@contextlib.contextmanager
def serving(step_s: float, **options: Any) -> Iterator[TimedServer]:
    server = TimedServer(step_s, **options)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def start_clients(server: TimedServer, **load: Any) -> subprocess.Popen[str]:
    """A process of `benchmarks.streaming_client`, which prints its numbers as one line of JSON."""
    command = [sys.executable, "-m", "benchmarks.streaming_client", json.dumps({"port": server.port, **load})]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def measure(server: TimedServer, **load: Any) -> dict[str, Any]:
    """The clients' numbers, and CPU seconds of every process meanwhile."""
    before = server.cpu_s()
    result: dict[str, Any] = json.loads(start_clients(server, **load).communicate()[0])
    result["cpu_s"] = {name: cpu_s - before[name] for name, cpu_s in server.cpu_s().items()}
    result["cpu_s"]["client"] = result["client_cpu_s"]
    return result


def report(api: str, step_s: float, num_clients: int, result: dict[str, Any]) -> None:
    wanted, cpu, span_s = num_clients / step_s, result["cpu_s"], result["span_s"]
    shares = "  ".join(f"{name} {cpu[name] / span_s:.2f}" for name in (*_PROCESSES, "client"))
    print(
        f"{api:<12}{result['tokens_per_s']:>9,.0f} tok/s ({result['tokens_per_s'] / wanted:5.1%}) "
        f"{result['events_per_token']:6.3f} events/token  ITL {result['itl_p50']:.2f} / {result['itl_p99']:.2f} / "
        f"{result['itl_max']:.1f} steps  main {cpu['main'] / result['num_events'] * 1e6:5.1f} us/event  "
        f"{result['num_bytes'] / result['num_events']:.0f} bytes/event  cores: {shares}",
        flush=True,
    )


def crowd(server: TimedServer, api: str, step_s: float, num_tokens: int) -> None:
    """1,000 clients, of whom some never read and some leave: what the others see, beside 1,000 patient ones; what is left."""
    load = {"api": api, "step_s": step_s, "num_clients": 1000, "num_tokens": num_tokens}
    patient = measure(server, **load)
    rss = [server.main.memory_info().rss]
    result = measure(server, **load, num_silent=100, num_leaving=200)
    rss.append(server.main.memory_info().rss)
    deadline_s = time.monotonic() + 60
    while (state := server.get("/server_info")["internal_states"][0])["num_running_reqs"] and time.monotonic() < deadline_s:
        time.sleep(0.1)
    rss.append(server.main.memory_info().rss)
    for who, seen in (("all patient: their", patient), ("others'", result)):
        print(
            f"{api}, {who} ITL {seen['itl_p50']:.2f} / {seen['itl_p99']:.2f} / {seen['itl_max']:.1f} steps, "
            f"main {seen['cpu_s']['main'] / seen['num_events'] * 1e6:.1f} us/event"
        )
    print(f"  readers: {result['statuses']}, never reading: {result['silent_statuses']}")
    print(f"  resident MiB of main before, after, when idle: {', '.join(f'{size / 2**20:.1f}' for size in rss)}")
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "num_leaks_repaired", "num_aborted")
    print(f"  scheduler: { ({name: state.get(name) for name in names}) }")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--api", nargs="+", default=["native", "completions", "chat"], help="native, completions, chat")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each, in turns")
    parser.add_argument("--tokens", type=int, default=800, help="new tokens of a request")
    parser.add_argument("--clients", type=int, default=MAX_ROWS, help="clients at once")
    parser.add_argument("--step-s", type=float, default=0.004, help="time of a device step")
    parser.add_argument("--crowd", action="store_true", help="1,000 clients, some of them silent or leaving")
    parser.add_argument("--incremental", action="store_true", help="/generate streams new text only")
    args = parser.parse_args()
    options = {"incremental_streaming_output": args.incremental, "stream_stall_timeout_s": _STALL_TIMEOUT_S}
    with serving(args.step_s, **options) as server:
        if args.crowd:
            for api in args.api:
                crowd(server, api, args.step_s, args.tokens)
            return
        for _ in range(args.rounds):
            for api in args.api:
                load = {"api": api, "step_s": args.step_s, "num_clients": args.clients, "num_tokens": args.tokens}
                report(api, args.step_s, args.clients, measure(server, **load))


if __name__ == "__main__":
    main()
