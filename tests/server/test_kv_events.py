"""KV cache events on the wire: what subscribers get, what a replay brings, and a server with two replicas."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from event_index import EventIndex
from server_process import serving

from jaxserve.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from jaxserve.config import KVEventsConfig, endpoint_of
from jaxserve.server.kv_events import KVEventPublisher

ROOT = Path(__file__).resolve().parents[2]
END_SEQ = b"\xff" * 8
STORED = BlockStored([-5, 2**63 - 1], None, [1, 2], 1, None, "GPU", "tenant-a")
AS_MAP: dict[str, Any] = {
    "type": "BlockStored", "block_hashes": [-5, 2**63 - 1], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 1,
    "lora_id": None, "medium": "GPU", "cache_salt": "tenant-a",
}  # fmt: skip
AS_VLLM: dict[str, Any] = {
    "type": "BlockStored", "block_hashes": [2**64 - 5, 2**63 - 1], "parent_block_hash": None, "token_ids": [1, 2],
    "block_size": 1, "lora_id": None, "medium": "GPU", "lora_name": None,
    "extra_keys": [["tenant-a"], None],
}  # fmt: skip


class Batch(msgspec.Struct, array_like=True):
    """A reader's own declarations: not those that were written by."""

    ts: float
    events: list[Any]
    attn_dp_rank: int | None = None


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return int(first)
    raise AssertionError("no free ports")


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


def subscribe(context: zmq.Context[Any], endpoint: str, topic: bytes = b"") -> zmq.Socket[bytes]:
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, topic)
    subscriber.setsockopt(zmq.RCVTIMEO, 10_000)
    subscriber.connect(endpoint)
    return subscriber


def receive(subscriber: zmq.Socket[bytes]) -> tuple[bytes, int, Batch]:
    topic, seq, payload = subscriber.recv_multipart()
    assert len(seq) == 8
    return topic, int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload, type=Batch)


def replay(
    context: zmq.Context[Any], endpoint: str, start: int, envelope: tuple[bytes, ...] = (b"",)
) -> list[tuple[int, Batch]]:
    """As SGLang's router asks."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, 10_000)
    dealer.connect(endpoint)
    dealer.send_multipart((*envelope, start.to_bytes(8, "big")))
    found = []
    while (frames := dealer.recv_multipart()) != [*envelope, END_SEQ, b""]:
        *before, seq, payload = frames
        assert tuple(before) == envelope
        found.append((int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload, type=Batch)))
    dealer.close()
    return found


def publisher_on(first_port: int, rank: int = 0, **fields: Any) -> KVEventPublisher:
    endpoint = f"tcp://127.0.0.1:{first_port}"
    return KVEventPublisher(KVEventsConfig(endpoint=endpoint, bind=True, **fields), rank)


def wait_for_subscriber(publisher: KVEventPublisher, subscriber: zmq.Socket[bytes]) -> int:
    """Publishes until something arrives; returns the last number that did."""
    for _ in range(1000):
        publisher.publish([AllBlocksCleared()])
        if subscriber.poll(10):
            break
    seq = -1
    while subscriber.poll(50):
        _, seq, _ = receive(subscriber)
    assert seq >= 0
    return seq


class TestPublisher:
    @pytest.mark.parametrize(
        ("encoding", "stored", "removed", "cleared"),
        [
            ("map", AS_MAP, {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}, {"type": "AllBlocksCleared"}),
            (
                "array",
                ["BlockStored", [-5, 2**63 - 1], None, [1, 2], 1, None, "GPU"],
                ["BlockRemoved", [3], "GPU"],
                ["AllBlocksCleared"],
            ),
            (
                "vllm",
                AS_VLLM,
                {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"},
                {"type": "AllBlocksCleared"},
            ),
        ],
    )
    def test_batches_arrive_numbered(
        self, context: zmq.Context[Any], encoding: Any, stored: Any, removed: Any, cleared: Any
    ) -> None:
        port = free_ports(3)
        publisher = publisher_on(port, rank=2, topic="kv@here@demo", encoding=encoding)
        with subscribe(context, f"tcp://127.0.0.1:{port + 2}", b"kv@") as subscriber:
            last = wait_for_subscriber(publisher, subscriber)
            publisher.publish([])
            publisher.publish([STORED, BlockRemoved([3], "GPU"), AllBlocksCleared()])
            publisher.publish([BlockRemoved([4], "GPU")])
            topic, seq, batch = receive(subscriber)
            assert (topic, seq, batch.attn_dp_rank) == (b"kv@here@demo", last + 1, 2)
            assert batch.events == [stored, removed, cleared]
            assert abs(batch.ts - time.time()) < 60
            assert receive(subscriber)[1] == last + 2
        publisher.close()

    def test_it_connects_to_who_listens(self, context: zmq.Context[Any]) -> None:
        with context.socket(zmq.SUB) as subscriber:
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            port = subscriber.bind_to_random_port("tcp://127.0.0.1")
            publisher = KVEventPublisher(KVEventsConfig(endpoint=f"tcp://127.0.0.1:{port}"))
            wait_for_subscriber(publisher, subscriber)
            publisher.close()

    def test_what_waits_is_sent_at_the_end(self, context: zmq.Context[Any]) -> None:
        port = free_ports(1)
        publisher = publisher_on(port)
        with subscribe(context, f"tcp://127.0.0.1:{port}") as subscriber:
            last = wait_for_subscriber(publisher, subscriber)
            for _ in range(200):
                publisher.publish([STORED])
            publisher.close()
            assert [receive(subscriber)[1] for _ in range(200)] == list(range(last + 1, last + 201))

    def test_a_replay_brings_what_is_kept(self, context: zmq.Context[Any]) -> None:
        port = free_ports(2)
        endpoint = f"tcp://127.0.0.1:{port + 1}"
        publisher = publisher_on(port, replay_endpoint=endpoint, buffer_steps=1500)
        for block_hash in range(2000):
            publisher.publish([BlockRemoved([block_hash], "GPU")])
        found: list[tuple[int, Batch]] = []
        while not found or found[-1][0] != 1999:  # the thread may not be there yet
            found = replay(context, endpoint, 0)
        assert [seq for seq, _ in found] == list(range(500, 2000)), "the newest, beyond what a socket holds by default"
        assert all(batch.events[0]["block_hashes"] == [seq] for seq, batch in found)
        assert [seq for seq, _ in replay(context, endpoint, 1998, envelope=())] == [1998, 1999]
        assert replay(context, endpoint, 2000) == []
        with context.socket(zmq.REQ) as req:
            req.connect(endpoint)
            req.send((1999).to_bytes(8, "big"))
            assert req.poll(10_000)
            seq, _ = req.recv_multipart()
            assert int.from_bytes(seq, "big") == 1999
        publisher.close()

    def test_nonsense_at_the_replay_endpoint_is_ignored(self, context: zmq.Context[Any]) -> None:
        port = free_ports(2)
        endpoint = f"tcp://127.0.0.1:{port + 1}"
        publisher = publisher_on(port, replay_endpoint=endpoint)
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(endpoint)
            dealer.send_multipart([b"", b"all of it"])
            dealer.send_multipart([b""])
            assert replay(context, endpoint, 0) == []
            assert not dealer.poll(0)
        publisher.close()

    def test_a_full_queue_drops_with_a_gap_and_says_so_once(self, caplog: pytest.LogCaptureFixture) -> None:
        publisher = publisher_on(free_ports(1), max_queue_size=3)
        publisher.close()  # nobody takes anything out of the queue any more
        for _ in range(10):
            publisher.publish([STORED])
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
            "KV events: 3 batches wait to be sent (max_queue_size); number 3 is dropped, and maybe others later."
        ]
        first = publisher._queue.get_nowait()
        publisher.publish([STORED])
        waiting = [publisher._queue.get_nowait() for _ in range(3)]
        assert [batch.seq for batch in (first, *waiting) if batch is not None] == [0, 1, 2, 10]

    def test_a_port_in_use_is_a_sentence(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ValueError, match=rf"cannot open tcp://127\.0\.0\.1:{port}: Address already in use\.$"):
                publisher_on(port)


def test_endpoints_of_replicas() -> None:
    assert [endpoint_of("tcp://*:5557", rank) for rank in (0, 3)] == ["tcp://*:5557", "tcp://*:5560"]
    assert [endpoint_of("tcp://[::1]:5557", rank) for rank in (0, 1)] == ["tcp://[::1]:5557", "tcp://[::1]:5558"]
    assert [endpoint_of("ipc:///run/kv", rank) for rank in (0, 1)] == ["ipc:///run/kv", "ipc:///run/kv_dp1"]


def test_two_replicas_tell_what_each_has_cached(folder: Path, context: zmq.Context[Any]) -> None:
    port = free_ports(4)
    config = {
        "publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}", "bind": True, "topic": "kv",
        "replay_endpoint": f"tcp://127.0.0.1:{port + 2}",
    }  # fmt: skip
    prompts = [list(range(100, 130)), list(range(200, 240))]
    with serving(folder, dp_size=2, restart_workers=True, kv_events_config=json.dumps(config)) as server:
        server.wait_for("/ready", 200)
        info = httpx.get(f"{server.url}/server_info").json()
        page_size = info["internal_states"][0]["page_size"]
        assert info["kv_events"] == {
            "publisher": "zmq", "endpoint_host": "127.0.0.1", "endpoint_port_base": port, "topic": "kv",
            "block_size": page_size, "dp_size": 2, "replay_endpoint_host": "127.0.0.1", "replay_endpoint_port_base": port + 2,
        }  # fmt: skip
        for rank in (0, 1, 1):
            generate(server.url, prompts[rank], rank)
        assert example_reads(server.url).startswith("replica 1, batch ")
        for rank, prompt in enumerate(prompts):
            index = EventIndex(page_size)
            batches = replay(context, f"tcp://127.0.0.1:{port + 2 + rank}", 0)
            assert [seq for seq, _ in batches] == list(range(len(batches)))
            assert {batch.attn_dp_rank for _, batch in batches} == {rank}
            for _, batch in batches:
                index.take_in(msgspec.convert(batch.events, list[BlockStored | BlockRemoved | AllBlocksCleared]))
            of_prompt = {(None, tuple(prompt[:end])) for end in range(page_size, len(prompt) + 1, page_size)}
            assert of_prompt <= index.prefixes
            assert not any(tokens[0] == prompts[1 - rank][0] for _, tokens in index.prefixes)
        assert httpx.post(f"{server.url}/flush_cache").status_code == 200
        for rank in (0, 1):
            wait_until_cleared(context, f"tcp://127.0.0.1:{port + 2 + rank}")
        victim = next(child for child in server.children if child.cmdline()[-2:] == ["1", "0"])
        os.kill(victim.pid, signal.SIGKILL)
        while not (batches := replay(context, f"tcp://127.0.0.1:{port + 3}", 0)):
            time.sleep(0.05)
        seq, batch = batches[0]
        assert (seq, batch.events[0]) == (0, {"type": "AllBlocksCleared"}), "it began anew"
        server.stop()


def example_reads(url: str) -> str:
    """What the example prints of the first batch it gets."""
    command = [sys.executable, str(ROOT / "examples" / "kv_events.py"), "--url", url, "--batches", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as example:
        assert example.stdout is not None and example.stdout.readline() == "subscribed\n"
        first = 300
        while example.poll() is None:
            generate(url, [first, first + 1, first + 2], 1)
            first += 3
        return example.stdout.read()


def generate(url: str, prompt: list[int], rank: int) -> None:
    body = {"input_ids": prompt, "routed_dp_rank": rank, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    assert httpx.post(f"{url}/generate", json=body, timeout=60).status_code == 200


def wait_until_cleared(context: zmq.Context[Any], endpoint: str) -> None:
    for _ in range(200):
        if replay(context, endpoint, 0)[-1][1].events == [{"type": "AllBlocksCleared"}]:
            return
        time.sleep(0.02)
    raise AssertionError("a flush was not told")


def test_a_port_in_use_ends_the_server_with_a_sentence(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = json.dumps({"publisher": "zmq", "endpoint": endpoint, "bind": True})
        with serving(folder, kv_events_config=config) as server:
            assert server.exit_status() == 1
            assert f"--kv-events-config: cannot open {endpoint}: Address already in use." in server.log
            assert "Traceback" not in server.log
