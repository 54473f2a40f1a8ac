"""KVEventPublisher: sends what the prefix cache gains and loses to whoever subscribes, as SGLang does.

A batch is a message of three frames: the topic, a number that counts up from 0 (8 bytes, big endian), and msgpack of
[time, events, rank]. A subscriber that misses a number can ask for it and all after it at the replay endpoint: it sends the
number, gets a message [number, batch] for each that is kept, and one with the number -1 and nothing behind.

The scheduler only puts its events into a queue. A thread, to which the sockets belong, numbers nothing and decides nothing; it
encodes, sends and answers. Where the queue is full a batch is dropped with its number, so that subscribers notice.
"""

from __future__ import annotations

import collections
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

from jaxserve.config import KVEventsConfig, endpoint_of
from jaxserve.namespaces import adapter_of

logger = logging.getLogger(__name__)

_END_SEQ = (-1).to_bytes(8, "big", signed=True)
_POSITIONAL_FIELDS = 6  # of BlockStored in an array: what comes behind has different meanings in SGLang and vLLM
_UINT64 = 2**64 - 1
_REPLAY_POLL_S = 0.05  # how long somebody who asks for a replay may wait
_CLOSE_TIMEOUT_S = 5.0
_LINGER_MS = 1000


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float  # seconds since the epoch
    events: Sequence[Any]
    attn_dp_rank: int  # the replica's


class _Numbered(NamedTuple):
    seq: int
    ts: float
    events: Sequence[msgspec.Struct]


class KVEventPublisher:
    """Events from one replica. `publish` belongs to one thread."""

    def __init__(self, config: KVEventsConfig, rank: int = 0) -> None:
        """ValueError with a sentence if a socket cannot be had."""
        self._config = config
        self._rank = rank
        self._topic = config.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._next_seq = 0
        self._has_dropped = False
        self._queue: queue.SimpleQueue[_Numbered | None] = queue.SimpleQueue()  # None: nothing follows
        self._sent: collections.deque[tuple[bytes, bytes]] = collections.deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        try:
            self._pub = self._open(zmq.PUB, config.hwm, config.endpoint, binds=config.binds)
            self._replay = None
            if config.replay_endpoint is not None:
                # A whole replay fits, whatever its reader does: else a ROUTER drops the rest without a word.
                self._replay = self._open(zmq.ROUTER, config.buffer_steps + 1, config.replay_endpoint, binds=True)
        except ValueError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[msgspec.Struct]) -> None:
        """Never waits."""
        if not events:
            return
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        if self._queue.qsize() < self._config.max_queue_size:
            self._queue.put(_Numbered(seq, time.time(), events))
        elif not self._has_dropped:
            self._has_dropped = True
            logger.warning(
                "KV events: %d batches wait to be sent (max_queue_size); number %d is dropped, and maybe others later.",
                self._config.max_queue_size,
                seq,
            )

    def close(self) -> None:
        """Sends what waits."""
        self._queue.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    # --- the thread

    def _run(self) -> None:
        try:
            goes_on = True
            while goes_on:
                try:
                    goes_on = self._turn()
                except Exception:
                    logger.exception("KV events: a batch or a replay could not be sent.")
        finally:
            self._context.destroy(linger=_LINGER_MS)

    def _turn(self) -> bool:
        """Whether anything can follow."""
        if self._replay is not None and self._replay.poll(0):
            self._answer(self._replay)
        try:
            batch = self._queue.get(timeout=None if self._replay is None else _REPLAY_POLL_S)
        except queue.Empty:
            return True
        if batch is not None:
            self._send(batch)
        return batch is not None

    def _send(self, batch: _Numbered) -> None:
        encode = _ENCODINGS[self._config.encoding]
        events = batch.events if encode is None else [encode(event) for event in batch.events]
        payload = self._encoder.encode(KVEventBatch(batch.ts, events, self._rank))
        seq = batch.seq.to_bytes(8, "big")
        self._pub.send_multipart((self._topic, seq, payload))
        if self._replay is not None:
            self._sent.append((seq, payload))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """The client is named by all frames but the last: its identity, and what sets a REQ's envelope apart."""
        *client, start = replay.recv_multipart()
        if len(start) != 8:
            logger.warning("KV events: whoever asks for a replay sends a number of 8 bytes; this one sent %d.", len(start))
            return
        for seq, payload in self._sent:
            if seq >= start:  # big endian: the order of bytes is that of numbers
                replay.send_multipart((*client, seq, payload))
        replay.send_multipart((*client, _END_SEQ, b""))

    def _open(self, kind: int, hwm: int, endpoint: str, *, binds: bool) -> zmq.Socket[bytes]:
        endpoint = endpoint_of(endpoint, self._rank)
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"--kv-events-config: cannot open {endpoint}: {zmq.strerror(error.errno or 0)}.") from error
        logger.info("KV events: %s %s.", "listening at" if binds else "connecting to", endpoint)
        return socket


def _as_array(event: msgspec.Struct) -> tuple[Any, ...]:
    return (type(event).__name__, *msgspec.structs.astuple(event)[:_POSITIONAL_FIELDS])


def _as_vllm(event: msgspec.Struct) -> dict[str, Any]:
    """What vLLM's readers insist on: hashes without a sign, `lora_name` even where there is none, no field of SGLang's, and the
    salt among what a sequence's first block was hashed with."""
    fields = {"type": type(event).__name__, **msgspec.structs.asdict(event)}
    if "block_hashes" in fields:
        fields["block_hashes"] = [block_hash & _UINT64 for block_hash in fields["block_hashes"]]
    if "token_ids" in fields:
        salt, parent = fields.pop("cache_salt"), fields["parent_block_hash"]
        adapter = None if fields["lora_id"] is None else adapter_of(salt)
        fields["lora_name"] = None if adapter is None else adapter.name
        if parent is not None:
            fields["parent_block_hash"] = parent & _UINT64
        elif salt is not None:
            fields["extra_keys"] = [[salt], *[None] * (len(fields["block_hashes"]) - 1)]
    return fields


_ENCODINGS: dict[str, Callable[[msgspec.Struct], Any] | None] = {"map": None, "array": _as_array, "vllm": _as_vllm}
