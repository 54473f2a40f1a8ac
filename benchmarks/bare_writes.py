"""What `benchmarks.streaming` cannot go below: a process that writes bytes which are there already to 256 connections a step.

    python -m benchmarks.bare_writes [--size 250] [--step-s 0.004] [--steps 1000]

No HTTP, no other process but the reader. Prints CPU time per write, of the user and of the kernel, whose part on a loopback
connection is the receiver's work, too.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import selectors
import socket
import time

import uvloop

CONNECTIONS = 256


def read_all(port: int) -> None:
    selector, buffer = selectors.DefaultSelector(), bytearray(1 << 16)
    for _ in range(CONNECTIONS):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, connection)
    while selector.get_map():
        for key, _ in selector.select():
            if not key.data.recv_into(buffer):
                selector.unregister(key.fileobj)


async def write_steps(size: int, step_s: float, num_steps: int) -> None:
    loop, transports, connected = asyncio.get_running_loop(), [], asyncio.Event()

    class Connection(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(transport)
            if len(transports) == CONNECTIONS:
                connected.set()

    server = await loop.create_server(Connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reader = multiprocessing.get_context("spawn").Process(target=read_all, args=(port,))
    reader.start()
    await connected.wait()
    data, before, started_s = b"x" * size, os.times(), time.monotonic()
    for step in range(1, num_steps + 1):
        for transport in transports:
            transport.write(data)
        await asyncio.sleep(max(started_s + step * step_s - time.monotonic(), 0))
    after, writes = os.times(), num_steps * CONNECTIONS
    user, system = ((b - a) / writes * 1e6 for a, b in ((before.user, after.user), (before.system, after.system)))
    rate = writes / (time.monotonic() - started_s)
    print(
        f"{size} bytes: {user + system:.1f} us a write (user {user:.1f}, kernel {system:.1f}), {rate:,.0f} writes/s", flush=True
    )
    for transport in transports:
        transport.close()
    await asyncio.to_thread(reader.join)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=250)
    parser.add_argument("--step-s", type=float, default=0.004)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    uvloop.run(write_steps(options.size, options.step_s, options.steps))


if __name__ == "__main__":
    main()
