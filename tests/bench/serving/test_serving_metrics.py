"""What a run's numbers are, by requests whose times one can compute by hand."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.bench.serving.metrics import detail_fields, event_tokens, most_at_once, run_fields, token_gaps
from jaxserve.bench.serving.tokens import Tokens
from jaxserve.bench.serving.work import INTERRUPTED, Outcome


def outcome(**fields: Any) -> Outcome:
    values = {"task": 0, "turn": 0, "start_s": 0.0, "prompt_len": 10}
    return Outcome(**(values | fields))


@pytest.mark.parametrize(
    ("counts", "gaps"),
    [
        ([1, 1, 1], [1.0, 2.0]),
        ([1, 2, 1], [0.5, 0.5, 2.0]),  # an event of two tokens: its gap is shared
        ([3, 1, 4], [1.0, 0.5, 0.5, 0.5, 0.5]),  # the first event's tokens have no gap
        ([1, 0, 1], [3.0]),  # none: its time goes to the next
    ],
)
def test_gaps_between_tokens(counts: list[int], gaps: list[float]) -> None:
    assert token_gaps([0.5, 1.5, 3.5], counts) == gaps


def test_tokens_of_events_that_do_not_say() -> None:
    demo = Tokens.load("demo")
    times: dict[str, Any] = {"times_s": [0.1, 0.2, 0.3], "tokens": [0, 0, 0]}
    assert event_tokens(outcome(**times, output_len=3), demo) == [1, 1, 1]
    assert event_tokens(outcome(times_s=[0.1, 0.2, 0.3], tokens=[2, 3, 4], output_len=9), demo) == [2, 3, 4]
    texts = ["the", " house is", " of"]
    sizes = demo.counts(texts)
    told = outcome(**times, texts=texts, output_len=sum(sizes))
    assert event_tokens(told, demo) == sizes
    assert sum(event_tokens(outcome(**times, texts=texts, output_len=17), demo)) == 17
    assert event_tokens(outcome(**times, texts=texts), demo) == sizes  # not even the total is told
    assert event_tokens(outcome(**times, texts=texts, output_len=6), None) == [2, 2, 2]


def four_outcomes() -> list[Outcome]:
    """Two good ones over 4 s, an error, and one that Ctrl-C cut."""
    return [
        outcome(start_s=100.0, e2e_s=3.0, times_s=[1.0, 2.0, 3.0], tokens=[1, 1, 1], output_len=3, cached_tokens=5),
        outcome(
            start_s=101.0, e2e_s=3.0, times_s=[2.0, 3.0], tokens=[1, 4], output_len=5, server_prompt_len=15, verify_steps=2
        ),
        outcome(start_s=101.0, e2e_s=0.5, error_kind="HTTP 503", error="busy"),
        outcome(start_s=103.0, e2e_s=0.5, error_kind=INTERRUPTED, error="stopped"),
    ]


def test_a_run_by_hand() -> None:
    slo = {"ttft": 1500.0, "tpot": 1000.0}
    fields = run_fields(four_outcomes(), 100.0, None, slo)
    expected = {
        "duration": 4.0, "completed": 2, "failed": 1, "not_finished": 1, "total_input_tokens": 25, "total_output_tokens": 8,
        "request_throughput": 0.5, "input_throughput": 6.25, "output_throughput": 2.0, "total_throughput": 8.25,
        "mean_e2e_latency_ms": 3000.0, "mean_ttft_ms": 1500.0, "median_ttft_ms": 1500.0, "mean_tpot_ms": 625.0,
        "mean_itl_ms": 500.0, "max_itl_ms": 1000.0, "p90_itl_ms": 1000.0, "concurrency": 1.5, "max_concurrent_requests": 2,
        "accept_length": 2.5, "max_output_tokens_per_s": 4.0, "goodput": 0.25, "slo_attainment": pytest.approx(1 / 3),
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    assert fields["failures"] == {"HTTP 503": {"count": 1, "message": "busy"}}
    assert fields["cache_report"] == {"total_prompt_tokens": 25, "total_cached_tokens": 5, "cache_hit_rate_pct": 20.0}
    details = detail_fields(four_outcomes(), 100.0, None)
    assert details["output_lens"] == [3, 5, 0, 0]
    assert details["itls"] == [[1.0, 1.0], [0.25] * 4, [], []]
    assert details["start_times"] == [0.0, 1.0, 1.0, 3.0]
    assert details["errors"] == ["", "", "HTTP 503: busy", "interrupted: stopped"]


def test_a_run_without_a_success() -> None:
    fields = run_fields([outcome(error_kind="timed out", error="x", start_s=1.0, e2e_s=1.0)], 1.0, None, {"ttft": 1.0})
    assert (fields["completed"], fields["failed"], fields["slo_attainment"], fields["mean_ttft_ms"]) == (0, 1, 0.0, None)


def test_one_that_begins_as_another_ends_is_not_at_once() -> None:
    times = ((0.0, 1.0), (1.0, 1.0), (1.5, 1.0))
    assert most_at_once([outcome(start_s=start_s, e2e_s=e2e_s) for start_s, e2e_s in times]) == 2


def test_whole_replies_have_no_token_times() -> None:
    whole = outcome(e2e_s=2.0, times_s=[2.0], tokens=[0], output_len=4)
    fields = run_fields([whole], 0.0, None, {}, streamed=False)
    assert (fields["mean_ttft_ms"], fields["mean_tpot_ms"], fields["mean_itl_ms"]) == (None, None, None)
    assert (fields["output_throughput"], fields["mean_e2e_latency_ms"]) == (2.0, 2000.0)
