"""What large and hostile requests cost others: the longest gap that one patient streaming client sees beside each of them.

    python -m benchmarks.floods [--only batch_leaves,long_text] [--scale 1.0]

A server with the demo model is started for each flood. The client streams request after request from a process of its own; its
longest wait between two events of a stream is printed (its next request waits its turn in the queue, which is no gap), next to
the same without a flood, with the main and the scheduler process's memory (resident MiB) before, at its highest, and 5 s after.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import math
import pathlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxserve.bench.live_server import Server, serve
from jaxserve.demo import demo_model_path

_QUIET_S = 3.0
_AFTER_S = 5.0
_GIVE_UP_S = 100.0
_SAMPLE_S = 0.05
_PATIENT = {"text": "Tell me", "stream": True, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}


@dataclasses.dataclass(frozen=True)
class Flood:
    path: str
    make: Callable[[float], bytes]  # the body, at a scale
    leaves_after_s: float | None = None  # None: stays for the reply
    times: int = 1  # at once


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()


def _batch(count: int) -> bytes:
    return _json({"text": ["a"] * count, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}})


def _generate(text: str, **params: Any) -> bytes:
    return _json({"text": text, "sampling_params": {"max_new_tokens": 32, "ignore_eos": True, **params}})


def _chat(**fields: Any) -> bytes:
    return _json({"messages": [{"role": "user", "content": "a"}], "max_tokens": 8, **fields})


_EMPTY = {"role": "user", "content": ""}
_PART = {"type": "text", "text": ""}

FLOODS = {
    "batch_leaves": Flood("/generate", lambda x: _batch(int(10_000 * x)), leaves_after_s=3.0),
    "batch_30000": Flood("/generate", lambda x: _batch(int(30_000 * x)), leaves_after_s=3.0),
    "long_text": Flood("/generate", lambda x: _generate("a b " * int(14_000_000 * x))),
    "long_texts": Flood("/generate", lambda x: _json({"text": ["a b " * 100_000] * int(100 * x)})),
    "tokenize": Flood("/tokenize", lambda x: _json({"prompt": "a b " * int(1_000_000 * x)})),
    "empty_messages": Flood("/v1/chat/completions", lambda x: _chat(messages=[_EMPTY] * int(500_000 * x))),
    "empty_parts": Flood(
        "/v1/chat/completions", lambda x: _chat(messages=[{"role": "user", "content": [_PART] * int(500_000 * x)}])
    ),
    "stop_strings": Flood("/v1/chat/completions", lambda x: _chat(stop=["a"] * int(1_000_000 * x))),
    "logit_bias": Flood("/v1/chat/completions", lambda x: _chat(logit_bias={str(i): 1 for i in range(int(1_000_000 * x))})),
    "input_ids": Flood("/generate", lambda x: _json({"input_ids": [1] * int(20_000_000 * x)})),
    "stop_regex_long": Flood("/generate", lambda x: _generate("a", stop_regex="|".join(["a"] * int(800_000 * x)))),
    "stop_regex_hard": Flood("/generate", lambda x: _generate("b", stop_regex=["(?:b|bb){11}[c]"] * 32), times=16),
    "stop_regex_wide": Flood(
        "/generate", lambda x: _json({"text": [f"b{i}" for i in range(64)], "sampling_params": [
            {"max_new_tokens": 32, "stop_regex": [rf"(?i)([\w\s]\b?){{{i + 40}}}ß[é-ｚ]{{99}}"]} for i in range(64)]})
    ),
    "regex_grammar": Flood("/generate", lambda x: _generate("a", regex="((a{30}){30}){30}|(b|bb){400}[^c]{2000}"), times=4),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(FLOODS))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--patient", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.patient:
        _be_patient(options.patient)
        return
    print(
        f"{'flood':<16} {'reply':>7} {'after':>8} {'gap':>9} {'quiet gap':>9}   main: before, most, after   scheduler: the same"
    )
    for name in options.only.split(","):
        with serve("--model-path", demo_model_path(), "--log-level", "critical") as server:
            print(_one(name, FLOODS[name], server, options.scale), flush=True)


def _one(name: str, flood: Flood, server: Server, scale: float) -> str:
    body = flood.make(scale)
    processes = _processes(server.port)
    before = {kind: _resident_mib(pid) for kind, pid in processes.items()}
    most = dict(before)
    with _patient_client(server.port) as gaps:
        time.sleep(_QUIET_S)
        quiet_s = gaps.longest_s()
        started_s = time.monotonic()
        replies: list[str] = []
        threads = [threading.Thread(target=lambda: replies.append(_send(server, flood, body))) for _ in range(flood.times)]
        for thread in threads:
            thread.start()
        replied_s = 0.0
        while (now_s := time.monotonic()) - started_s < _GIVE_UP_S and (not replied_s or now_s - replied_s < _AFTER_S):
            if not replied_s and not any(thread.is_alive() for thread in threads):
                replied_s = now_s
            for kind, pid in processes.items():
                most[kind] = max(most[kind], _resident_mib(pid))
            time.sleep(_SAMPLE_S)
        flood_s = gaps.longest_s()
    after = {kind: _resident_mib(pid) for kind, pid in processes.items()}
    took = f"{replied_s - started_s:.2f} s" if replied_s else "never"
    memory = "   ".join(f"{before[kind]:5.0f} {most[kind]:5.0f} {after[kind]:5.0f} MiB" for kind in ("main", "scheduler"))
    return (
        f"{name:<16} {'/'.join(sorted(set(replies))):>7} {took:>8} {flood_s * 1000:6.0f} ms {quiet_s * 1000:6.0f} ms   {memory}"
    )


def _send(server: Server, flood: Flood, body: bytes) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_GIVE_UP_S)
    try:
        connection.request("POST", flood.path, body, {"Content-Type": "application/json"})
        if flood.leaves_after_s is not None:
            assert connection.sock is not None
            connection.sock.settimeout(flood.leaves_after_s)
        with contextlib.closing(connection.getresponse()) as reply:
            reply.read()
            return str(reply.status)
    except TimeoutError:
        return "left"
    except (OSError, http.client.HTTPException):
        return "cut"
    finally:
        connection.close()


# --- the patient client


class _Gaps:
    """What the client's process reports: one line per wait that was the longest so far since it was last asked."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def longest_s(self) -> float:
        """Since the last call, a wait that still lasts included."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


@contextlib.contextmanager
def _patient_client(port: int) -> Iterator[_Gaps]:
    command = [sys.executable, "-m", "benchmarks.floods", "--patient", str(port)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield _Gaps(process)
    finally:
        process.kill()
        process.wait()


class _Waits:
    def __init__(self) -> None:
        self.last_s = time.monotonic()
        self.longest_s = 0.0

    def begins(self) -> None:
        """The next event is a stream's first: the wait for it does not count."""
        self.last_s = math.inf

    def arrived(self) -> None:
        now_s = time.monotonic()
        self.longest_s, self.last_s = max(self.longest_s, now_s - self.last_s), now_s


def _be_patient(port: int) -> None:
    """Streams one request after the other; answers each line of standard input with the longest wait since the last one."""
    waits = _Waits()
    threading.Thread(target=_stream_for_ever, args=(port, waits), daemon=True).start()
    for _ in sys.stdin:
        print(max(waits.longest_s, time.monotonic() - waits.last_s), flush=True)
        waits.longest_s = 0.0


def _stream_for_ever(port: int, waits: _Waits) -> None:
    body = _json(_PATIENT)
    lines = (
        "POST /generate HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "",
        "",
    )
    message = "\r\n".join(lines).encode() + body
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                while True:
                    waits.begins()
                    connection.sendall(message)
                    tail = b""
                    while not tail.endswith(b"0\r\n\r\n"):
                        data = connection.recv(1 << 20)
                        if not data:
                            raise ConnectionResetError
                        waits.arrived()
                        tail = (tail + data)[-5:]
        except OSError:  # the server is down: one long wait
            waits.arrived()
            time.sleep(0.1)


# --- the server's processes


def _processes(port: int) -> dict[str, int]:
    """Of the server that listens on `port`: by its command line, then its children by theirs."""
    commands = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                commands[int(entry.name)] = (entry / "cmdline").read_text().split("\0")
    main = next(pid for pid, command in commands.items() if str(port) in command and "serve" in command)
    scheduler = next(pid for pid in commands if _parent(pid) == main and any("scheduler" in part for part in commands[pid]))
    return {"main": main, "scheduler": scheduler}


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _resident_mib(pid: int) -> float:
    with contextlib.suppress(OSError, StopIteration):
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    main()
