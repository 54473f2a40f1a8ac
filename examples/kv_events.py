"""What a server's prefix cache gains and loses, as routers hear it: `python examples/kv_events.py [--url URL] [--batches N]`.

The server needs `--kv-events-config '{"publisher": "zmq"}'`. Reads the events of all replicas until interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import urllib.error
import urllib.parse
import urllib.request

import msgspec
import zmq


def subscribe(url: str, api_key: str) -> zmq.Socket[bytes]:
    asked = urllib.request.Request(f"{url}/server_info", headers={"Authorization": f"Bearer {api_key}"})
    with urllib.request.urlopen(asked) as reply:
        where = json.load(reply)["kv_events"]
    if where is None:
        sys.exit('This server tells nothing. Start it with: --kv-events-config \'{"publisher": "zmq"}\'')
    host = where["endpoint_host"]
    if host in ("*", "0.0.0.0"):
        host = urllib.parse.urlsplit(url).hostname
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt_string(zmq.SUBSCRIBE, where["topic"])
    for rank in range(where["dp_size"]):
        socket.connect(f"tcp://{host}:{where['endpoint_port_base'] + rank}")
    return socket


def read(socket: zmq.Socket[bytes]) -> None:
    """One batch. A number that is left out was missed: the replay endpoint may still have it."""
    _, seq, payload = socket.recv_multipart()
    _, events, rank = msgspec.msgpack.decode(payload)
    for event in events:
        blocks = event.get("block_hashes", [])
        print(f"replica {rank}, batch {int.from_bytes(seq, 'big')}: {event['type']} {blocks[:2]} ({len(blocks)})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--api-key", default="none", help="The server's --api-key, if it has one.")
    parser.add_argument("--batches", type=int, help="End after so many.")
    options = parser.parse_args()
    try:
        socket = subscribe(options.url, options.api_key)
    except urllib.error.URLError:
        sys.exit(f"No server answers at {options.url}. Start one with: jaxserve serve demo")
    print("subscribed", flush=True)
    for _ in itertools.count() if options.batches is None else range(options.batches):
        read(socket)


if __name__ == "__main__":
    main()
