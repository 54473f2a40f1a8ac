"""What a scheduler tells of its prefix cache, round by round."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from event_index import EventIndex
from scheduler_harness import Harness, prompt_of

from jaxserve.cache.events import AllBlocksCleared, BlockStored
from jaxserve.scheduler.control.flush_cache import FlushCacheReqInput

ON = {"kv_events_config": '{"publisher": "zmq"}'}


def test_a_round_tells_what_it_did(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(ON, page_size=4, overlap=False)
    harness.turn()
    assert harness.events == [[AllBlocksCleared()]]
    prompt = prompt_of(10)
    rid = harness.submit(prompt, max_new=4, ignore_eos=True)
    harness.turn()
    ((stored,),) = harness.events[1:]
    assert isinstance(stored, BlockStored)
    assert (stored.token_ids, stored.parent_block_hash) == (prompt[:8], None), "shared as soon as it is launched"
    harness.run()
    ((output,),) = [events for events in harness.events[2:] if events]
    assert isinstance(output, BlockStored)
    assert output.token_ids == [*prompt[8:], *harness.answer(rid).token_ids[:2]]
    assert output.parent_block_hash == stored.block_hashes[-1]
    harness.control(FlushCacheReqInput())
    harness.turn()
    assert harness.events[-1] == [AllBlocksCleared()]


@pytest.mark.parametrize("page_size", [1, 16])
def test_events_add_up_to_what_is_cached(make_harness: Callable[..., Harness], page_size: int) -> None:
    harness = make_harness(ON, page_size=page_size, num_pages=512 // page_size)
    rng = np.random.default_rng(0)
    for i in range(60):
        prompt = [*prompt_of(40, int(rng.integers(3))), *prompt_of(int(rng.integers(1, 40)), i)]
        harness.submit(prompt, max_new=int(rng.integers(1, 30)), ignore_eos=True)
    harness.run()
    harness.assert_as_expected()
    index = EventIndex(page_size)
    for events in harness.events:
        index.take_in(events)
    cache = harness.scheduler.cache
    assert len(index.prefixes) * page_size == cache.num_cached_tokens
    for _, tokens in index.prefixes:
        assert cache.match(np.array(tokens, np.int32)).length_tokens == len(tokens)
    stored = sum(isinstance(event, BlockStored) for events in harness.events for event in events)
    assert stored < sum(map(len, harness.events)), "some were evicted"


def test_nothing_is_told_unless_asked(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"kv_events_config": '{"publisher": "null"}'})
    harness.submit([5, 6, 7])
    harness.run()
    assert not any(harness.events)
