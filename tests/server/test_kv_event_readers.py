"""What others read of our KV events: declarations of the readers' own, as strict as they are. Written from their sources.

llm-d (kvevents/engineadapter), vLLM's router (kv_index), Dynamo's indexer (kv-router/zmq_wire). Each batch is an array of time,
events and rank; each message has three frames, the second 8 bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
import zmq

from benchmarks.kv_events import full_cache
from benchmarks.radix import Prompts, whole_life
from jaxserve.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from jaxserve.config import KVEventsConfig
from jaxserve.server.kv_events import KVEventPublisher

UINT64 = 2**64
TOPIC = "kv@10.0.0.1:8000@demo"
# msgspec's integers end at 64 bits, signed or not; -5 is as good for it as 2**64 - 5.
Unsigned = Annotated[int, msgspec.Meta(ge=0)]
Token = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class LlmdStored(msgspec.Struct, array_like=True, tag="BlockStored", forbid_unknown_fields=True):
    """By position. What stands behind `medium` would be lora_name and extra_keys."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[Token]
    block_size: int
    lora_id: int | None
    medium: str | None


class LlmdRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved", forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None


class LlmdCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared", forbid_unknown_fields=True):
    pass


class VllmStored(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=True):
    """What has no default here must be there, if only as null; and a hash has no sign."""

    block_hashes: list[Unsigned]
    parent_block_hash: Unsigned | None
    token_ids: list[Token]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class VllmRemoved(msgspec.Struct, tag="BlockRemoved", forbid_unknown_fields=True):
    block_hashes: list[Unsigned]
    medium: str | None


class VllmCleared(msgspec.Struct, tag="AllBlocksCleared", forbid_unknown_fields=True):
    pass


class DynamoStored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int]
    token_ids: list[Token]
    block_size: int
    parent_block_hash: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None


class DynamoRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class DynamoCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


READERS = [
    ("array", LlmdStored | LlmdRemoved | LlmdCleared),
    ("vllm", VllmStored | VllmRemoved | VllmCleared),
    ("map", DynamoStored | DynamoRemoved | DynamoCleared),
]


@pytest.fixture(scope="module")
def told() -> list[list[Any]]:
    """What a prefix cache tells of prompts that come and go, among them a salted one, and of a flush."""
    cache, prompts = full_cache(16, Prompts(64), record_events=True), Prompts(64)
    rounds = []
    for _ in range(20):
        whole_life(cache, prompts.fresh())
        if events := cache.take_events():
            rounds.append(events)
    salted = BlockStored([-7, 8], None, list(range(32)), 16, None, "GPU", "tenant")
    rounds += [[salted, BlockStored([9], 8, list(range(16)), 16, None, "GPU", "tenant")], [AllBlocksCleared()]]
    kinds = {type(event) for events in rounds for event in events}
    assert kinds == {BlockStored, BlockRemoved, AllBlocksCleared}
    return rounds


@contextlib.contextmanager
def sent(told: list[list[Any]], folder: Path, encoding: Any) -> Iterator[list[list[bytes]]]:
    """The messages, as a subscriber to `kv@` gets them."""
    endpoint = f"ipc://{folder}/kv"
    publisher = KVEventPublisher(KVEventsConfig(endpoint=endpoint, topic=TOPIC, encoding=encoding), rank=0)
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
        subscriber.setsockopt(zmq.RCVTIMEO, 10_000)
        subscriber.connect(endpoint)
        while not subscriber.poll(20):
            publisher.publish([AllBlocksCleared()])
        while subscriber.poll(100):
            subscriber.recv_multipart()
        for events in told:
            publisher.publish(events)
        yield [subscriber.recv_multipart() for _ in told]
    publisher.close()


@pytest.mark.parametrize(("encoding", "events_type"), READERS, ids=["llm-d", "vllm-router", "dynamo"])
def test_a_reader_gets_all_that_was_told(told: list[list[Any]], folder: Path, encoding: str, events_type: Any) -> None:
    decoder = msgspec.msgpack.Decoder(tuple[float, list[events_type], int])
    with sent(told, folder, encoding) as messages:
        numbers = [int.from_bytes(seq, "big") for _, seq, _ in messages]
        assert {(topic.decode(), len(seq)) for topic, seq, _ in messages} == {(TOPIC, 8)}
        assert numbers == list(range(numbers[0], numbers[0] + len(told)))
        batches = [decoder.decode(payload) for _, _, payload in messages]
    for events, (_, read, rank) in zip(told, batches, strict=True):
        assert rank == 0
        for event, theirs in zip(events, read, strict=True):
            assert same(event, theirs)


def same(event: Any, theirs: Any) -> bool:
    """Readers take a hash with a sign for the same 64 bits without one."""
    if isinstance(event, AllBlocksCleared):
        return "Cleared" in type(theirs).__name__
    hashes = [block_hash % UINT64 for block_hash in event.block_hashes]
    if [block_hash % UINT64 for block_hash in theirs.block_hashes] != hashes or theirs.medium != "GPU":
        return False
    if isinstance(event, BlockRemoved):
        return "Removed" in type(theirs).__name__
    parent = theirs.parent_block_hash
    is_chained = (parent is None) == (event.parent_block_hash is None) and (
        parent is None or parent % UINT64 == event.parent_block_hash % UINT64
    )
    salt = getattr(theirs, "cache_salt", event.cache_salt)
    return is_chained and (theirs.token_ids, theirs.block_size, salt) == (event.token_ids, 16, event.cache_salt)


def test_a_salt_is_among_the_extra_keys_of_the_first_block(told: list[list[Any]], folder: Path) -> None:
    decoder = msgspec.msgpack.Decoder(tuple[float, list[VllmStored | VllmRemoved | VllmCleared], int])
    with sent(told, folder, "vllm") as messages:
        _, (first, second), _ = decoder.decode(messages[-2][2])
    assert isinstance(first, VllmStored) and isinstance(second, VllmStored)
    assert (first.extra_keys, second.extra_keys) == ([["tenant"], None], None)
