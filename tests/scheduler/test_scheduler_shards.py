"""Attention by data parallelism: which shard gets a request, and that shards do not stand in each other's way.

The fake runner gives each shard pages of its own, so that a row that reads another shard's would get other tokens.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from cached_prefixes import cached_prefixes
from event_index import EventIndex
from fake_runner import fake_spec
from scheduler_harness import Harness, prompt_of
from test_scheduler_constraints import EOS, GRAMMARS, SMALL, THINKING, alone, run_until_answered
from test_scheduler_constraints import compiler as compiler
from test_scheduler_constraints import tokenizer as tokenizer
from tokenizers import Tokenizer

from jaxserve.cache.events import AllBlocksCleared
from jaxserve.config import ServerArgs
from jaxserve.grammar import GrammarCompiler
from jaxserve.runner import KVGroup, StepInput
from jaxserve.scheduler import prefill_adder
from jaxserve.scheduler.control.flush_cache import FlushCacheReqInput
from jaxserve.scheduler.prefill import prefill_limits
from jaxserve.types import ForwardMode

NO_EOS = (1000,)
MakeHarness = Callable[..., Harness]


def tokens_of_shards(harness: Harness, step: StepInput) -> list[int]:
    spec = harness.runner.spec
    lens = step.extend_lens.copy()
    lens[: step.num_decode_rows] = 1
    return np.bincount(step.rows // spec.rows_per_shard, lens, spec.num_shards).astype(int).tolist()


def prefill_shards(harness: Harness) -> list[list[int]]:
    """Prompt tokens of each shard, for each step that had any."""
    return [tokens_of_shards(harness, step) for step in harness.steps if step.mode is not ForwardMode.DECODE]


def running(harness: Harness) -> list[int]:
    """How many requests each shard has."""
    return [shard["num_running_reqs"] for shard in harness.scheduler.internal_state()["attn_dp"]]


def submit_crowd(harness: Harness, count: int, *, seed: int = 0, max_new: int = 12) -> None:
    """Some of them begin alike."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        base = prompt_of(60, int(rng.integers(4)))[: int(rng.integers(60))]
        harness.submit([*base, *prompt_of(int(rng.integers(1, 30)), i)], max_new=int(rng.integers(0, max_new)))
        harness.turn(int(rng.integers(3)))


# --- the same tokens


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("num_shards", "page_size"), [(2, 1), (4, 4)])
def test_a_crowd(make_harness: MakeHarness, num_shards: int, page_size: int, overlap: bool) -> None:
    harness = make_harness(overlap=overlap, num_shards=num_shards, page_size=page_size, num_pages=256 // page_size)
    submit_crowd(harness, 60)
    harness.run()
    harness.assert_as_expected()
    assert harness.scheduler.internal_state()["cached_tokens"] > 300


VARIANTS: dict[str, dict[str, Any]] = {
    "drafts": {"num_draft_tokens": 4},
    "window": {"kv_groups": (KVGroup(100), KVGroup(64, 12)), "max_step_tokens": 48},
    "only windows": {"kv_groups": (KVGroup(64, 12), KVGroup(90, 30)), "max_step_tokens": 48},
    "states": {"num_snapshots": 5, "num_draft_tokens": 2},
    "few rows": {"max_rows": 4},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("mixes", [False, True])
def test_other_models_short_of_memory(make_harness: MakeHarness, name: str, mixes: bool) -> None:
    args = {"enable_mixed_chunk": mixes, "schedule_conservativeness": 0.0, "chunked_prefill_size": 64}
    harness = make_harness(args, num_shards=2, **({"num_pages": 100, "page_size": 1} | VARIANTS[name]))
    submit_crowd(harness, 40, max_new=30)
    harness.run()
    harness.assert_as_expected()
    assert mixes == (ForwardMode.MIXED in harness.modes)


def test_aborts_at_random(make_harness: MakeHarness) -> None:
    harness = make_harness({"chunked_prefill_size": 32, "schedule_conservativeness": 0.0}, num_shards=4, num_pages=90)
    rng = np.random.default_rng(1)
    aborted: set[str] = set()
    for i in range(60):
        harness.submit(prompt_of(int(rng.integers(1, 80)), i % 7), max_new=10)
        harness.turn(int(rng.integers(3)))
        if rng.random() < 0.4:
            aborted.add(rid := f"r{rng.integers(i + 1)}")
            harness.abort(rid, exact=True)
    harness.run()
    harness.assert_as_expected(*(harness.sent.keys() - aborted))


@pytest.mark.parametrize(("num_shards", "num_draft_tokens"), [(2, 1), (2, 4), (4, 1)])
def test_a_crowd_with_grammars(
    make_harness: MakeHarness,
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    num_shards: int,
    num_draft_tokens: int,
) -> None:
    """Short of memory, some of them thinking; rows of most shards are masked in one step."""
    monkeypatch.setattr(prefill_adder, "CLIP_MAX_NEW_TOKENS", 2)  # admits more than fits in the end
    args = {"chunked_prefill_size": 32, "enable_mixed_chunk": True, "schedule_conservativeness": 0.0}
    spec = {**SMALL, "num_pages": 32, "max_rows": 4 * num_shards}
    harness = make_harness(args, grammars=compiler, num_shards=num_shards, num_draft_tokens=num_draft_tokens, **spec)
    rng = random.Random(num_shards)
    for i in range(20 * num_shards):
        grammar = rng.choice((None, *GRAMMARS, *GRAMMARS))
        sampling: dict[str, Any] = {} if grammar is None else {grammar.kind: grammar.text}
        if rng.random() < 0.5:
            sampling |= {"temperature": 1.5, "sampling_seed": i}
        thinking = None if grammar is None or rng.random() < 0.7 else rng.choice(THINKING)
        harness.submit(prompt_of(rng.randint(1, 60), i % 5), 60, thinking=thinking, **sampling)
        harness.turn(rng.randint(0, 1))
    run_until_answered(harness)
    num_whole = 0
    for rid, message in harness.sent.items():
        answer = harness.answer(rid)
        assert answer.finish is not None and answer.token_ids == alone(harness, compiler, rid), rid
        if (regex := message.sampling_params.regex) and answer.finish.type == "stop" and message.thinking is None:
            assert re.fullmatch(regex, tokenizer.decode([token for token in answer.token_ids if token != EOS])), rid
            num_whole += 1
    assert num_whole > 3 and harness.scheduler.internal_state()["num_retractions"] > 0
    masked = zip(harness.steps, harness.runner.masks, strict=True)
    shards = [
        step.rows[(masks != -1).any((1, 2))] // harness.runner.spec.rows_per_shard
        for step, masks in masked
        if masks is not None
    ]
    assert max(len(set(of_step.tolist())) for of_step in shards) > num_shards / 2


# --- which shard


@pytest.mark.parametrize("num_shards", [2, 4])
def test_a_burst_spreads_evenly(make_harness: MakeHarness, num_shards: int) -> None:
    harness = make_harness(num_shards=num_shards)
    for i in range(12):
        harness.submit(prompt_of(9, i), max_new=40, ignore_eos=True)
    harness.turn(4)
    assert running(harness) == [12 // num_shards] * num_shards
    harness.run()
    harness.assert_as_expected()


def test_a_prefix_is_found_where_it_is(make_harness: MakeHarness) -> None:
    harness = make_harness(num_shards=4)
    for i in range(4):
        harness.submit(prompt_of(40, i), max_new=1)
    harness.run()
    assert prefill_shards(harness) == [[32] * 4, [8] * 4]
    for i in (2, 0, 3, 1):
        rid = harness.submit([*prompt_of(40, i), 5, 6], max_new=1)
        harness.run()
        assert harness.answer(rid).cached_tokens == 40
        assert prefill_shards(harness)[-1] == [2 * (shard == i) for shard in range(4)]


def test_a_prefix_is_computed_once_more_where_its_shard_is_busy(make_harness: MakeHarness) -> None:
    harness = make_harness(num_shards=2)
    harness.submit(prompt_of(40), max_new=1)
    harness.run()
    for i in range(8):
        harness.submit([*prompt_of(40), *prompt_of(10, i)], max_new=60, ignore_eos=True)
        harness.turn(6)
    assert min(running(harness)) > 1, "all of them have the prefix, but in two places"
    harness.run()
    harness.assert_as_expected()


def test_a_full_shard_blocks_nobody(make_harness: MakeHarness) -> None:
    harness = make_harness(num_shards=2, num_pages=64)
    harness.submit(prompt_of(50), max_new=14, ignore_eos=True)
    harness.turn(3)
    rid = harness.submit([*prompt_of(50)[:40], *prompt_of(8, 1)], max_new=12, ignore_eos=True)
    harness.turn(2)
    assert running(harness) == [1, 1]
    harness.run()
    harness.assert_as_expected()
    assert harness.answer(rid).cached_tokens == 0, "it is cached, but where there is no room"


def test_no_shard_has_room(make_harness: MakeHarness) -> None:
    harness = make_harness(num_shards=2, num_pages=64)
    for i in range(5):
        harness.submit(prompt_of(40, i), max_new=20, ignore_eos=True)
    harness.turn(8)
    assert running(harness) == [1, 1]
    harness.run()
    harness.assert_as_expected()


@pytest.mark.parametrize(("most", "expected"), [(2, [1, 1]), (None, [2, 2])])
def test_rows_are_counted_over_all_shards(make_harness: MakeHarness, most: int | None, expected: list[int]) -> None:
    harness = make_harness({"max_running_requests": most}, num_shards=2, max_rows=4)
    for i in range(6):
        harness.submit(prompt_of(5, i), max_new=20, ignore_eos=True)
    harness.turn(6)
    assert running(harness) == expected
    harness.run()
    harness.assert_as_expected()


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_policies_look_at_all_trees(make_harness: MakeHarness, policy: str) -> None:
    harness = make_harness({"schedule_policy": policy, "prefill_max_requests": 1}, num_shards=2, max_rows=2)
    cached = [prompt_of(30, i) for i in range(2)]
    for prompt in cached:
        harness.submit(prompt, max_new=1)
    harness.run()
    rids = [harness.submit([*prompt, 9], max_new=1) for prompt in (prompt_of(40, 7), cached[1], cached[0])]
    harness.run()
    first_scheduled = [harness.answer(rid).times.first_scheduled_s for rid in rids]
    assert first_scheduled[0] > max(first_scheduled[1:]), "those with a cached prefix go first, whichever shard has it"


# --- shares of a step


def test_shares_of_a_step() -> None:
    limits = prefill_limits(ServerArgs(chunked_prefill_size=100), fake_spec(num_shards=4, page_size=8))
    assert (limits.step_tokens, limits.shard_tokens) == (100, 24)
    alone = prefill_limits(ServerArgs(chunked_prefill_size=100), fake_spec(page_size=8))
    assert alone.shard_tokens == alone.step_tokens == 100
    short = prefill_limits(ServerArgs(chunked_prefill_size=17), fake_spec(num_shards=4, page_size=8))
    assert (short.step_tokens, short.shard_tokens) == (17, 8), "a page at least: then not all have a share of each step"


def test_each_shard_has_a_chunked_prompt(make_harness: MakeHarness) -> None:
    harness = make_harness({"chunked_prefill_size": 32}, num_shards=2)
    for i in range(4):
        harness.submit(prompt_of(40, i), max_new=1)
    harness.run()
    harness.assert_as_expected()
    # Of the last one nobody else waits: it may use the whole step.
    assert prefill_shards(harness) == [[16, 16]] * 5


def test_a_lonely_prompt_takes_whole_steps(make_harness: MakeHarness) -> None:
    harness = make_harness({"chunked_prefill_size": 32}, num_shards=2)
    harness.submit(prompt_of(90), max_new=1)
    harness.run()
    assert harness.prefill_lens() == [[32], [32], [26]]


def test_copies_that_wait_for_a_prompt_do_not_slow_it_down(make_harness: MakeHarness) -> None:
    harness = make_harness({"chunked_prefill_size": 64}, num_shards=2)
    for _ in range(4):
        harness.submit(prompt_of(200), max_new=4)
    harness.run()
    harness.assert_as_expected()
    assert harness.prefill_lens() == [[32], [64], [64], [40], [1, 1, 1]]


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("num_shards", [2, 4])
def test_nobody_takes_more_than_a_share(make_harness: MakeHarness, num_shards: int, mixes: bool) -> None:
    harness = make_harness({"chunked_prefill_size": 64, "enable_mixed_chunk": mixes}, num_shards=num_shards, context_len=512)
    rng = np.random.default_rng(2)
    for i in range(40):
        harness.submit(prompt_of(int(rng.integers(5, 120)), i), max_new=20, ignore_eos=True)
        harness.turn(i % 3)
    harness.run()
    harness.assert_as_expected()
    share, full = 64 // num_shards, 0
    steps = [step for step in harness.steps if step.mode is not ForwardMode.DECODE]
    for step, tokens in zip(steps, prefill_shards(harness), strict=True):
        assert sum(tokens) <= 64
        if len(set(step.rows[step.num_decode_rows :] // harness.runner.spec.rows_per_shard)) > 1:
            assert max(tokens) <= share, tokens
            full += tokens == [share] * num_shards
    assert full > 5 and mixes == (ForwardMode.MIXED in harness.modes)


def test_whole_prompts_may_exceed_a_share(make_harness: MakeHarness) -> None:
    harness = make_harness({"chunked_prefill_size": -1}, num_shards=4)
    for i in range(6):
        harness.submit(prompt_of(60 + i, i), max_new=3)
    harness.run()
    harness.assert_as_expected()
    assert all(sum(tokens) <= 128 for tokens in prefill_shards(harness))


def test_a_cached_prefix_is_worth_waiting_for(make_harness: MakeHarness) -> None:
    """More than a share of it."""
    harness = make_harness({"chunked_prefill_size": 32}, num_shards=2)
    base = prompt_of(100)
    harness.submit(base, max_new=1)
    harness.run()
    first = len(harness.steps)
    for i in range(3):
        harness.submit([*base, *prompt_of(9, i)], max_new=1)
    harness.submit(prompt_of(10, 9), max_new=1)
    harness.run()
    harness.assert_as_expected()
    tokens = [tokens_of_shards(harness, step) for step in harness.steps[first:] if step.mode is not ForwardMode.DECODE]
    assert tokens == [[16, 10], [11, 0]], "one is split, one waits, and who needs the other shard does not wait"


# --- memory


def test_who_is_retracted_is_in_a_shard_that_is_short(make_harness: MakeHarness) -> None:
    harness = make_harness({"schedule_conservativeness": 0.0}, eos_token_ids=NO_EOS, num_shards=2, num_pages=128)
    base = prompt_of(48)
    harness.submit(base, max_new=1)
    harness.run()
    for i in range(4):
        harness.submit([*base, *prompt_of(2, i)], max_new=32)
        harness.turn(2)
    lone = harness.submit(prompt_of(20, 9), max_new=32)
    harness.turn(2)
    assert running(harness) == [4, 1]
    harness.run()
    harness.assert_as_expected()
    assert harness.scheduler.internal_state()["num_retractions"] > 0
    assert harness.answer(lone).times.num_retractions == 0, "it has the fewest outputs, but its going would help nobody"


def test_who_has_no_room_alone_ends_and_the_other_shard_goes_on(make_harness: MakeHarness) -> None:
    """Cannot happen by the limits intake sets."""
    harness = make_harness(num_shards=2)
    rids = [harness.submit(prompt_of(10, i), max_new=20, ignore_eos=True) for i in range(2)]
    harness.turn(4)
    with mock.patch.object(harness.scheduler.cache.shards[1], "has_room", lambda rows, lengths: not len(rows)):
        harness.run()
    harness.assert_as_expected(rids[0])
    finish = harness.answer(rids[1]).finish
    assert finish is not None and finish.status_code == 500


def test_half_a_prompt_gives_way_only_in_its_own_shard(make_harness: MakeHarness) -> None:
    args = {"schedule_conservativeness": 0.0, "chunked_prefill_size": 16, "prefill_decode_interval": 8}
    harness = make_harness(args, eos_token_ids=NO_EOS, num_shards=2, num_pages=64)
    for i in range(2):
        harness.submit(prompt_of(10, i), max_new=54)
    harness.turn(3)
    with mock.patch("jaxserve.scheduler.prefill_adder.PrefillAdder._fits_memory", return_value=True):
        harness.submit(prompt_of(60, 7), max_new=2)
        harness.run()
    harness.assert_as_expected()
    assert harness.answer("r2").times.num_retractions >= 1
    assert [harness.answer(rid).times.num_retractions for rid in ("r0", "r1")] == [0, 0]


@pytest.mark.parametrize(("length", "preempts"), [(50, True), (130, False)])
def test_who_is_preempted_must_make_room_where_it_is(make_harness: MakeHarness, length: int, preempts: bool) -> None:
    """One of 130 tokens fits into no shard as long as those in it stay that are as urgent."""
    harness = make_harness({"enable_priority_scheduling": True}, num_shards=2, num_pages=180)
    for i, (size, max_new, priority) in enumerate(((60, 60, 50), (60, 60, 50), (30, 10, 0), (30, 10, 0))):
        harness.submit(prompt_of(size, i), max_new, priority=priority, ignore_eos=True)
        harness.turn(2)
    assert running(harness) == [2, 2]
    harness.submit(prompt_of(length, 9), max_new=2, priority=50)
    harness.run()
    harness.assert_as_expected()
    assert harness.scheduler.internal_state()["num_preemptions"] == (1 if preempts else 0)


def test_who_is_preempted_for_a_place_among_all_may_be_anywhere(make_harness: MakeHarness) -> None:
    """The urgent one fits into the empty shard, but only two may run."""
    args = {"enable_priority_scheduling": True, "max_running_requests": 2}
    harness = make_harness(args, num_shards=2, num_pages=100)
    base = prompt_of(40)
    harness.submit(base, max_new=1)
    harness.run()
    harness.submit([*base, *prompt_of(20, 1)], max_new=20, rid="peer", priority=50, ignore_eos=True)
    harness.turn(2)
    harness.submit([*base, *prompt_of(5, 2)], max_new=5, rid="low", priority=0, ignore_eos=True)
    harness.turn(2)
    assert running(harness) == [2, 0]
    harness.submit(prompt_of(95, 3), max_new=2, rid="urgent", priority=50)
    harness.run()
    harness.assert_as_expected()
    assert harness.scheduler.internal_state()["num_preemptions"] == 1
    assert harness.answer("low").times.num_retractions == 1


# --- what is told


def test_events_are_those_of_one_cache(make_harness: MakeHarness) -> None:
    args = {"kv_events_config": '{"publisher": "zmq"}'}
    harness = make_harness(args, num_shards=2, page_size=4, num_pages=40)
    index, cache = EventIndex(4), harness.scheduler.cache
    for seed in range(3):
        submit_crowd(harness, 25, seed=seed)
        harness.run()
        for events in harness.events:
            index.take_in(events)
        harness.events.clear()
        trees = [set(cached_prefixes(shard.tree, 4)) for shard in cache.shards]
        tokens = [{tokens for _, tokens in tree} for tree in trees]
        assert {tokens for _, tokens in index.prefixes} == tokens[0] | tokens[1]
        assert tokens[0] & tokens[1] and tokens[0] ^ tokens[1]
    harness.control(FlushCacheReqInput())
    harness.turn(2)
    assert [event for events in harness.events for event in events] == [AllBlocksCleared()]
    assert cache.num_cached_tokens == 0


def test_the_state_has_each_shard(make_harness: MakeHarness) -> None:
    assert "attn_dp" not in make_harness().scheduler.internal_state()
    harness = make_harness(num_shards=2, num_pages=100)
    harness.submit(prompt_of(19), max_new=40, ignore_eos=True)
    harness.turn(1)
    state = harness.scheduler.internal_state()
    assert state["attn_dp"] == [
        {"num_running_reqs": 1, "num_used_tokens": 19, "token_usage": 0.19},
        {"num_running_reqs": 0, "num_used_tokens": 0, "token_usage": 0.0},
    ]
    assert state["num_used_tokens"] == 19 and state["max_total_num_tokens"] == 200
