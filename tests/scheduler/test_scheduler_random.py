"""Random workloads in every mode: each request ends exactly once with the oracle's tokens, and the pool is whole afterwards."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
from fake_vectors import fake_vectors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness

from jaxserve.messages import Route
from jaxserve.runner import KVGroup
from jaxserve.scheduler import prefill_adder
from jaxserve.scheduler.control.block_input import BlockInputReqInput
from jaxserve.scheduler.control.continue_generation import ContinueGenerationReqInput
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqInput
from jaxserve.scheduler.control.release_input import ReleaseInputReq
from jaxserve.scheduler.control.unblock_input import UnblockInputReqInput

MAX_STEP_TOKENS = 160
VECTORS = (fake_vectors(), fake_vectors(needs_whole=True), fake_vectors(needs_whole=True, of_tokens=True))
POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "priority")


def random_args(rng: random.Random, page_size: int, num_shards: int) -> dict[str, Any]:
    chunk = rng.choice([-1, max(page_size * num_shards, 16), max(page_size * num_shards, 32), 64, 128])
    return {
        "schedule_policy": rng.choice(POLICIES),
        "chunked_prefill_size": chunk,
        "enable_mixed_chunk": chunk != -1 and rng.random() < 0.4,
        "prefill_decode_interval": rng.choice([None, 0, 1, 3]),
        "disable_radix_cache": rng.random() < 0.15,
        "radix_eviction_policy": rng.choice(["lru", "lfu", "fifo", "priority"]),
        "schedule_conservativeness": rng.choice([0.0, 0.0, 0.3, 1.0]),
        "retraction_policy": rng.choice(["length", "priority"]),
        "prefill_max_requests": rng.choice([None, None, 2]),
        "max_running_requests": rng.choice([None, None, None, 1, 3]),
        "priority_scheduling_preemption_threshold": rng.choice([0, 2, 10]),
        "stream_interval": rng.choice([1, 3]),
    }


def random_groups(rng: random.Random, num_pages: int, page_size: int) -> tuple[KVGroup, ...]:
    """A pool of a window is smaller, but one request can always go on."""
    windows = rng.choice([(None,), (None,), (None, 5), (None, 24), (24,), (3, 40)])
    groups = []
    for window in windows:
        least = num_pages if window is None else min(num_pages, (window + MAX_STEP_TOKENS) // page_size + 3)
        groups.append(KVGroup(max(num_pages // rng.choice([1, 2, 4]), least), window))
    return tuple(groups)


def submit_random(harness: Harness, rng: random.Random, bases: list[list[int]]) -> str:
    base = rng.choice(bases)
    prompt = base[: rng.randint(0, len(base))] + [rng.randint(1, 100) for _ in range(rng.randint(1, 8))]
    sampling: dict[str, Any] = {"ignore_eos": rng.random() < 0.7}
    if rng.random() < 0.3:
        sampling |= {"temperature": 0.8, "sampling_seed": rng.randint(-(2**63), 2**63 - 1)}
    if rng.random() < 0.3:
        sampling["stop_token_ids"] = [rng.randint(1, 100) for _ in range(rng.randint(1, 9))]
    return harness.submit(
        prompt,
        max_new=rng.choice([0, 1, 5, 20, 60, 100]),
        stream=rng.random() < 0.5,
        priority=rng.choice([None, 0, 3, 9]),
        extra_key=rng.choice([None, None, None, "other"]),
        return_logprob=rng.random() < 0.2,
        top_logprobs_num=rng.randint(0, 4),
        route=Route(len(harness.sent) % (1 + len(bases[0]) % 3)),
        **sampling,
    )


def pool_random(harness: Harness, rng: random.Random, bases: list[list[int]]) -> str:
    base = rng.choice(bases)
    prompt = base[: rng.randint(0, len(base))] + [rng.randint(1, 100) for _ in range(rng.randint(1, 50))]
    route = Route(len(harness.sent) % (1 + len(bases[0]) % 3))
    return harness.pool(prompt, priority=rng.choice([None, 0, 3, 9]), route=route)


def unblock(harness: Harness) -> None:
    harness.control(UnblockInputReqInput())
    harness.control(ReleaseInputReq())


def run_workload(seed: int, overlap: bool, delays_input: bool = False, num_shards: int = 1, pools: bool = False) -> Harness:
    """Half of the workloads admit requests as if they produced next to nothing, so that memory does run out."""
    rng = random.Random(seed)
    clip_tokens = rng.choice([2, prefill_adder.CLIP_MAX_NEW_TOKENS])
    with mock.patch.object(prefill_adder, "CLIP_MAX_NEW_TOKENS", clip_tokens):
        on_input, on_pool = (random.Random(seed) if wanted else None for wanted in (delays_input, pools))
        return run_clipped_workload(rng, overlap, on_input, num_shards, on_pool)


def run_clipped_workload(
    rng: random.Random, overlap: bool, on_input: random.Random | None, num_shards: int, on_pool: random.Random | None
) -> Harness:
    """`on_input`: blocks input now and then, and looks for messages rarely. `on_pool`: wants vectors of texts, too."""
    page_size = rng.choice([1, 1, 4, 16])
    args = random_args(rng, page_size, num_shards)
    groups = random_groups(rng, rng.choice([48, 96, 160, 256, 1024]) // page_size, page_size)
    has_states = groups[0].window is None and not args["disable_radix_cache"] and rng.random() < 0.5
    harness = Harness(
        {
            **args,
            "mamba_track_interval": rng.choice([1, 8, 64]),
            "scheduler_recv_interval": on_input.choice([1, 3, 8]) if on_input else 1,
        },
        overlap=overlap,
        page_size=page_size,
        kv_groups=groups,
        max_rows=max(rng.choice([2, 8, 16]), num_shards),
        num_shards=num_shards,
        context_len=160,
        max_step_tokens=MAX_STEP_TOKENS,
        num_draft_tokens=(1, 2, 4, 7)[groups[0].num_pages % 4] if has_states else rng.choice([1, 2, 4, 7]),
        num_snapshots=rng.choice([1, 4, 40]) if has_states else 0,
        vectors=on_pool.choice(VECTORS) if on_pool else None,
    )
    try:
        bases = [[rng.randint(1, 100) for _ in range(rng.randint(1, 90))] for _ in range(3)]
        aborted = set()
        for _ in range(rng.randint(5, 40)):
            for _ in range(rng.choice([0, 1, 1, 5])):
                submit_random(harness, rng, bases)
            while on_pool and on_pool.random() < 0.5:
                pool_random(harness, on_pool, bases)
            if harness.sent and rng.random() < 0.1:
                aborted.add(rid := rng.choice(list(harness.sent)))
                harness.abort(rid, exact=True)
            if on_input and on_input.random() < 0.2:
                harness.control(BlockInputReqInput())
            elif on_input and on_input.random() < 0.4:
                unblock(harness)
            harness.turn(rng.randint(0, 4))
            if rng.random() < 0.05:
                harness.control(PauseGenerationReqInput(mode=rng.choice(["retract", "in_place"])))
                harness.turn(rng.randint(1, 3))
                submit_random(harness, rng, bases)
                harness.control(ContinueGenerationReqInput())
        unblock(harness)
        harness.run()
        most = harness.runner.spec.max_sequence_tokens
        refused = {rid for rid, message in harness.sent.items() if len(message.input_ids) > most}
        assert set(harness.transport.answers) == set(harness.sent)
        for rid, answer in harness.transport.answers.items():
            assert answer.finish is not None, f"{rid} has no terminal message"
            assert answer.route == harness.sent[rid].route
            expected = harness.expected(rid)
            has_vectors = harness.sent[rid].pools and answer.finish.type != "abort"
            assert (answer.pooled is not None) == has_vectors
            if answer.pooled is not None:
                assert answer.pooled.tolist() == harness.expected_vectors(rid)
            if answer.finish.type == "abort":
                assert rid in aborted or rid in refused, f"{rid}: {answer.finish}"
                assert answer.token_ids == expected[: len(answer.token_ids)]
            else:
                assert answer.token_ids == expected, f"{rid}: {answer.token_ids} instead of {expected}"
                if harness.sent[rid].return_logprob and answer.token_ids:
                    given = [x for part in answer.logprobs for x in part.logprobs.tolist()]
                    assert given == pytest.approx([-(token + 1) / 101 for token in expected])
        return harness
    finally:
        harness.close()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    overlap=st.booleans(),
    delays_input=st.booleans(),
    num_shards=st.sampled_from([1, 1, 2, 4]),
    pools=st.booleans(),
)
def test_random_workloads(seed: int, overlap: bool, delays_input: bool, num_shards: int, pools: bool) -> None:
    run_workload(seed, overlap, delays_input, num_shards, pools)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_workloads_reach_the_hard_cases(num_shards: int) -> None:
    """Else the test above proves little."""
    totals: dict[str, int] = {}
    for seed in range(20 // num_shards):
        harness = run_workload(seed, overlap=True, num_shards=num_shards)
        state = harness.scheduler.internal_state()
        for key in ("num_retractions", "num_preemptions", "cached_tokens", "num_leaks_repaired"):
            totals[key] = totals.get(key, 0) + state[key]
    least = {"num_retractions": 20, "num_preemptions": 5, "cached_tokens": 1000}
    assert all(totals[key] > count // num_shards for key, count in least.items()), totals
    assert totals["num_leaks_repaired"] == 0
