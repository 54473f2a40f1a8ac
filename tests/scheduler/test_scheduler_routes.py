"""Outputs of requests with several routes: each goes its own way, and nothing is lost or comes twice."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scheduler_harness import Harness, LetterDecoder, prompt_of

from jaxserve.messages import BatchTokenIDOut, Route
from jaxserve.scheduler.outputs import OutputSender

# So many are admitted that some are retracted: see test_scheduler_retraction.
CARELESS = {"schedule_conservativeness": 0.0}
NO_EOS = (1000,)
ONE = (Route(),)
SEVERAL = (Route(1, 3), Route(), Route(2), Route(1, None), Route(0, 1))


def publishes(harness: Harness) -> list[list[BatchTokenIDOut]]:
    """From now on, the messages of each publish that sent any."""
    found: list[list[BatchTokenIDOut]] = []
    outputs: OutputSender = harness.scheduler._outputs
    publish, send = outputs.publish, outputs._send

    def noted_publish(rows: np.ndarray) -> None:
        found.append([])
        publish(rows)
        if not found[-1]:
            found.pop()

    def noted_send(message: BatchTokenIDOut) -> None:
        found[-1].append(message)
        send(message)

    outputs.publish, outputs._send = noted_publish, noted_send  # type: ignore[method-assign]
    return found


def run_all_kinds(make_harness: Callable[..., Harness], seed: int, overlap: bool, routes: Sequence[Route]) -> Harness:
    """Streams and others, with all that a message can carry; some are refused, aborted while they wait or run, or retracted."""
    rng = random.Random(seed)
    harness = make_harness(
        CARELESS | {"max_queued_requests": 12, "chunked_prefill_size": 32, "stream_interval": 2},
        overlap=overlap,
        text_decoder=LetterDecoder(),
        eos_token_ids=NO_EOS,
        num_pages=96,
        max_rows=12,
        returns_hidden_states=True,
    )
    sent = publishes(harness)
    for _ in range(25):
        for _ in range(rng.choice([0, 1, 2, 6])):
            kind = rng.random()
            harness.submit(
                prompt_of(200 if kind < 0.05 else rng.randint(1, 30), rng.randint(0, 5)),
                rng.choice([0, 1, 4, 20, 60]),
                stream=rng.random() < 0.6,
                return_logprob=rng.random() < 0.4,
                top_logprobs_num=rng.randint(0, 3),
                logprob_start_len=rng.choice([-1, 0]),
                return_hidden_states=rng.choice([False, False, True, "last"]),
                stop=["zzz"] if kind > 0.7 else [],
                stop_regex=["q{5}"] if kind > 0.85 else [],
                route=routes[len(harness.sent) % len(routes)],
            )
        if harness.sent and rng.random() < 0.3:
            harness.abort(rng.choice(list(harness.sent)), exact=True)
        harness.turn(rng.randint(1, 3))
    harness.run()
    assert sent and harness.scheduler.internal_state()["num_retractions"] > 0
    for messages in sent:
        used = [message.route for message in messages]
        assert len(set(used)) == len(used) <= len(routes), "one message for each route"
        for message in messages:
            assert all(harness.sent[rid].route == message.route for rid in message.rids)
    return harness


def told(harness: Harness) -> dict[str, str]:
    """All that was said of each request, but for where."""
    return {rid: repr(dataclasses.replace(answer, route=None)) for rid, answer in harness.transport.answers.items()}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(1, 7))
def test_splitting_loses_and_doubles_nothing(make_harness: Callable[..., Harness], seed: int, overlap: bool) -> None:
    one, several = (run_all_kinds(make_harness, seed, overlap, routes) for routes in (ONE, SEVERAL))
    assert set(one.sent) == set(several.sent)
    assert told(one) == told(several)
    assert {answer.route for answer in several.transport.answers.values()} == set(SEVERAL)
    answers = one.transport.answers.values()
    aborted = [answer for answer in answers if answer.finish is not None and answer.finish.type == "abort"]
    assert aborted and any(answer.logprobs for answer in answers) and any(answer.hidden_states for answer in answers)
    assert any(answer.input_logprobs for answer in answers) and any(answer.stops for answer in answers)


def test_ended_rejected_and_running_ones_of_all_routes_in_one_step(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(overlap=False)
    sent = publishes(harness)
    routes = [Route(0), Route(1), Route(2)]
    ending = [harness.submit(prompt_of(4, i), 2, ignore_eos=True, route=route) for i, route in enumerate(routes)]
    running = [harness.submit(prompt_of(5, i), 3, stream=True, ignore_eos=True, route=route) for i, route in enumerate(routes)]
    harness.turn()
    refused = harness.submit([101], route=Route(3), rid="refused")
    harness.run()
    given = [[(message.route.detokenizer, message.rids) for message in messages] for messages in sent]
    rows = [(rank, [rid]) for rank, rid in enumerate(running)]
    assert given[0] == rows
    assert (3, [refused]) in [one for messages in given for one in messages]
    step = next(messages for messages in given if [rid for _, rids in messages for rid in rids if rid in ending])
    assert [(rank, rids) for rank, rids in step if rank < 3] == [(rank, [running[rank], ending[rank]]) for rank in range(3)]
    assert harness.answer(refused).route == Route(3)
    harness.assert_as_expected(*ending, *running)


def test_a_rid_in_use_is_refused_to_whoever_came_second(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    messages: list[Any] = []
    harness.scheduler._outputs._send = messages.append
    harness.submit(prompt_of(4), 6, stream=True, ignore_eos=True, rid="r", route=Route(0, 0))
    harness.turn()
    harness.submit(prompt_of(5), 6, stream=True, ignore_eos=True, rid="r", route=Route(1, 1))
    harness.run()
    (refusal,) = [message for message in messages if message.route == Route(1, 1)]
    assert refusal.rids == ["r"] and "is in use" in refusal.finished[0].message
    others = [message for message in messages if message.route == Route(0, 0)]
    assert sum(int(message.token_counts.sum()) for message in others) == 6
    assert [reason.type for message in others for reason in message.finished.values()] == ["length"]
    assert len(others) + 1 == len(messages)


def test_a_retracted_request_keeps_its_route(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(CARELESS, eos_token_ids=NO_EOS, num_pages=96)
    routes = [Route(i % 2, i) for i in range(6)]
    rids = []
    for i, route in enumerate(routes):
        rids.append(harness.submit(prompt_of(10, i), 50, stream=True, route=route))
        harness.turn(4)
    harness.run()
    assert harness.scheduler.internal_state()["num_retractions"] > 0
    assert [harness.answer(rid).route for rid in rids] == routes
    harness.assert_as_expected()
