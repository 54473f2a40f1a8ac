"""How often the loop looks for messages: `--scheduler-recv-interval`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from scheduler_harness import Harness, prompt_of

from jaxserve.messages import Message, ShutdownReq
from jaxserve.scheduler.loop import SEQUENCES_PER_ROUND
from jaxserve.types import ForwardMode

both_loops = pytest.mark.parametrize("overlap", [True, False])


def counting(harness: Harness) -> list[int]:
    """For each call of recv_messages from now on: how many steps there had been."""
    calls: list[int] = []
    recv = harness.transport.recv_messages

    def counted(timeout_s: float | None) -> Sequence[Message]:
        calls.append(len(harness.steps))
        return recv(timeout_s)

    harness.transport.recv_messages = counted  # type: ignore[method-assign]
    return calls


@both_loops
@pytest.mark.parametrize("interval", [1, 4])
def test_it_receives_every_so_many_decode_rounds(make_harness: Callable[..., Harness], interval: int, overlap: bool) -> None:
    harness = make_harness({"scheduler_recv_interval": interval}, overlap=overlap)
    harness.submit(prompt_of(5), 100, ignore_eos=True)
    harness.turn(3)
    calls = counting(harness)
    harness.turn(40)
    assert set(harness.modes[-40:]) == {ForwardMode.DECODE}
    assert len(calls) == 40 // interval
    assert {later - earlier for earlier, later in itertools.pairwise(calls)} == {interval}
    harness.run()
    harness.assert_as_expected()


@both_loops
@pytest.mark.parametrize("turns", range(3, 11))
def test_who_arrives_is_seen_within_that_many_rounds(make_harness: Callable[..., Harness], turns: int, overlap: bool) -> None:
    harness = make_harness({"scheduler_recv_interval": 4}, overlap=overlap)
    harness.submit(prompt_of(5), 100, ignore_eos=True)
    harness.turn(turns)
    harness.submit(prompt_of(7), 4)
    harness.turn(4)
    assert harness.modes.count(ForwardMode.EXTEND) == 2
    calls = counting(harness)
    harness.abort("r0", exact=True)
    harness.turn(4)
    assert calls and harness.answer("r0").finish is not None
    harness.run()
    harness.assert_as_expected("r1")


@both_loops
def test_an_idle_loop_sees_it_at_once(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness({"scheduler_recv_interval": 1000}, overlap=overlap)
    harness.loop._sleep_on_idle = False
    for i in range(3):
        harness.submit(prompt_of(5, i), 6, ignore_eos=True)
        before = len(harness.steps)
        harness.turn()
        assert len(harness.steps) == before + 1
        harness.run()
    harness.assert_as_expected()


def test_rounds_that_are_no_decode_rounds_receive(make_harness: Callable[..., Harness]) -> None:
    """A long prompt in chunks, and a batch beyond what one round takes in."""
    harness = make_harness({"scheduler_recv_interval": 1000, "chunked_prefill_size": 16}, page_size=4, num_pages=512)
    harness.submit(prompt_of(96), 4)
    calls = counting(harness)
    harness.turn(6)
    assert len(calls) == 6
    harness.run()
    for _ in range(SEQUENCES_PER_ROUND + 10):
        harness.submit(prompt_of(4), 2)
    del calls[:]
    harness.turn(2)
    assert len(calls) == 2
    harness.run()
    harness.assert_as_expected()


@both_loops
def test_tokens_are_those_of_receiving_every_round(make_harness: Callable[..., Harness], overlap: bool) -> None:
    outputs = []
    for interval in (1, 4):
        harness = make_harness({"scheduler_recv_interval": interval, "chunked_prefill_size": 16}, overlap=overlap, max_rows=3)
        for i in range(8):
            harness.submit(prompt_of(5 + 7 * i, i), 5 + i, temperature=0.9, sampling_seed=i, ignore_eos=True)
            harness.turn(i % 3)
        harness.run()
        harness.assert_as_expected()
        outputs.append({rid: answer.token_ids for rid, answer in harness.transport.answers.items()})
    assert outputs[0] == outputs[1]


def test_a_shutdown_comes_through(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"scheduler_recv_interval": 4})
    harness.submit(prompt_of(5), 30, ignore_eos=True)
    harness.turn(5)
    harness.send(ShutdownReq())
    harness.loop.run()
    harness.assert_as_expected()
    assert harness.transport.shut_down
