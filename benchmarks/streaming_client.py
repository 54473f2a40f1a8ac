"""Many clients in one process, cheap enough not to be what is measured: epoll, raw sockets, events are only counted.

    python -m benchmarks.streaming_client '{"port": ..., "api": "native", "num_clients": 256, "num_tokens": 800}'

A client asks `num_requests` times, one after the other, on one connection. `num_silent` of the clients never read,
`num_leaving` close their connection after a random part. Prints one line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import resource
import select
import socket
import sys
import time
from typing import Any

import numpy as np

_READ_BYTES = 1 << 16
_SMALL_BUFFER_BYTES = 4096  # of clients that never read
_GIVE_UP_S = 60.0
_LAST_CHUNK = b"0\r\n\r\n"
_LENGTH = re.compile(rb"content-length: (\d+)")

PATHS = {"native": "/generate", "completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclasses.dataclass(frozen=True)
class Load:
    port: int
    api: str
    num_clients: int
    num_tokens: int
    num_requests: int = 1  # of each client
    stream: bool = True
    question: str = "wants to know"
    num_silent: int = 0
    num_leaving: int = 0
    step_s: float = 0.004
    steady_tokens: int = 16  # a client's gaps count from here on, and until so many before its end


@dataclasses.dataclass(slots=True)
class Client:
    connection: socket.socket
    index: int
    leaves_after: int | None = None  # events
    num_events: int = 0
    num_bytes: int = 0
    times_s: list[float] = dataclasses.field(default_factory=list)  # of reads
    counts: list[int] = dataclasses.field(default_factory=list)  # events in each
    tail: bytes = b""
    bytes_left: int | None = None  # of a reply that is not streamed; None: its head is not there yet
    num_replies: int = 0
    status: str = ""

    def ends_whole(self, received: memoryview) -> bool:
        """Whether this is the last of a reply that is not streamed."""
        if self.bytes_left is None:
            head, _, body = bytes(received).partition(b"\r\n\r\n")
            length = _LENGTH.search(head)
            if length is None or not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"not a reply to count: {bytes(received)!r}")
            self.bytes_left = int(length[1]) - len(body)
        else:
            self.bytes_left -= len(received)
        if self.bytes_left:
            return False
        self.bytes_left = None
        return True


def request_bytes(load: Load, index: int, number: int = 0) -> bytes:
    body: dict[str, Any] = {"stream": load.stream}
    prompt = f"Client {index}.{number} {load.question}"
    if load.api == "native":
        body |= {"text": prompt, "sampling_params": {"max_new_tokens": load.num_tokens, "ignore_eos": True}}
    else:
        body |= {"max_tokens": load.num_tokens, "ignore_eos": True}
        body |= {"prompt": prompt} if load.api == "completions" else {"messages": [{"role": "user", "content": prompt}]}
    data = json.dumps(body).encode()
    head = f"POST {PATHS[load.api]} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def connect(load: Load, index: int, *, silent: bool = False) -> socket.socket:
    connection = socket.socket()
    if silent:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER_BYTES)
    connection.connect(("127.0.0.1", load.port))
    connection.setblocking(False)
    connection.send(request_bytes(load, index))
    return connection


def run(load: Load) -> dict[str, Any]:
    """One request per client, all at once, until each has ended."""
    draw = random.Random(0)
    silent = [connect(load, i, silent=True) for i in range(load.num_silent)]
    clients: dict[int, Client] = {}
    began_s = time.monotonic()
    readers = [Client(connect(load, i), i) for i in range(load.num_silent, load.num_clients)]
    for client in draw.sample(readers, load.num_leaving):
        client.leaves_after = draw.randrange(1, load.num_tokens)
    with select.epoll() as epoll:
        for client in readers:
            clients[client.connection.fileno()] = client
            epoll.register(client.connection, select.EPOLLIN)
        _read_all(load, epoll, clients)
    ended_s = time.monotonic()
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    result = _summary(load, readers) | {"began_s": began_s, "ended_s": ended_s}
    result["client_cpu_s"] = cpu.ru_utime + cpu.ru_stime
    _end_silent(silent, result)
    return result


def _read_all(load: Load, epoll: select.epoll, clients: dict[int, Client]) -> None:
    now, poll = time.monotonic, epoll.poll
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    while clients:
        ready = poll(_GIVE_UP_S, 1024)
        if not ready:
            for client in clients.values():
                client.status = "silent"
            return
        for fd, _ in ready:
            client = clients[fd]
            try:
                size = client.connection.recv_into(buffer)
            except ConnectionResetError:
                size = 0
            if load.stream:
                count = buffer.count(b"data: ", 0, size)
                client.tail = (client.tail + buffer[max(0, size - 5) : size])[-5:]
                ended = client.tail == _LAST_CHUNK
            else:
                count = ended = bool(size) and client.ends_whole(view[:size])
            if count:
                client.num_events += count
                client.times_s.append(now())
                client.counts.append(count)
            client.num_bytes += size
            if ended:
                client.num_replies += 1
                if client.num_replies < load.num_requests:
                    client.tail = b""
                    client.connection.send(request_bytes(load, client.index, client.num_replies))
                    continue
            leaves = client.leaves_after is not None and client.num_events >= client.leaves_after
            if ended or leaves or not size:
                client.status = "ended" if ended else "left" if leaves else "cut"
                epoll.unregister(fd)
                client.connection.close()
                del clients[fd]


def _summary(load: Load, readers: list[Client]) -> dict[str, Any]:
    # Of a reply's events: role and finish reason; [DONE].
    extra = 0 if not load.stream else 3 if load.api == "chat" else 1
    gaps, rates, first, last = [], [], [], []
    num_events = num_tokens = 0
    statuses: dict[str, int] = {}
    for client in readers:
        statuses[client.status] = statuses.get(client.status, 0) + 1
        num_events += client.num_events
        if client.status != "ended":
            continue
        times, counts = np.array(client.times_s), np.cumsum(client.counts)
        steady = (counts > load.steady_tokens) & (counts <= counts[-1] - load.steady_tokens - extra)
        gaps.append(np.diff(times[steady]))
        of_client = load.num_tokens * client.num_replies
        num_tokens += of_client
        rates.append((of_client - 1) / max(times[-1] - times[0], 1e-9))
        first.append(times[0])
        last.append(times[-1])
    all_gaps = np.concatenate([np.zeros(0), *gaps]) / load.step_s
    all_gaps = all_gaps if len(all_gaps) else np.zeros(1)  # everything came together
    of_ended = sum(client.num_events - extra * client.num_replies for client in readers if client.status == "ended")
    return {
        "statuses": statuses,
        "num_events": num_events,
        "tokens_per_s": sum(rates),
        "num_tokens": num_tokens,
        "num_replies": sum(client.num_replies for client in readers),
        "events_per_token": of_ended / max(1, num_tokens),
        "itl_p50": float(np.percentile(all_gaps, 50)),
        "itl_p99": float(np.percentile(all_gaps, 99)),
        "itl_max": float(all_gaps.max()),
        "num_bytes": sum(client.num_bytes for client in readers),
        "span_s": max(last) - min(first),
    }


def _end_silent(silent: list[socket.socket], result: dict[str, Any]) -> None:
    """What those that never read find now: a reply that fitted the buffers on the way (ended), or a closed connection (cut)."""
    statuses = {"ended": 0, "cut": 0, "open": 0}
    for connection in silent:
        connection.setblocking(True)
        connection.settimeout(1.0)
        data = b""
        try:
            while not data.endswith(b"0\r\n\r\n") and (received := connection.recv(_READ_BYTES)):
                data = (data + received)[-5:]
            statuses["ended" if data.endswith(b"0\r\n\r\n") else "cut"] += 1
        except ConnectionResetError:
            statuses["cut"] += 1
        except TimeoutError:
            statuses["open"] += 1
        connection.close()
    result["silent_statuses"] = statuses


if __name__ == "__main__":
    print(json.dumps(run(Load(**json.loads(sys.argv[1])))))
