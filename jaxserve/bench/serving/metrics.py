"""Numbers of a run from the outcomes of its requests.

    TTFT   from sending to the first event that brought a token
    E2E    from sending to the last event of the stream
    TPOT   of a request: (E2E - TTFT) / (tokens - 1); requests of one token have none
    ITL    the gap before each token after those of the first event. An event that brought k tokens after a gap of t counts as k
           gaps of t / k, as in SGLang: the mean stays the time per token, while peaks of speculation look flatter than they are

How many tokens an event brought is what it says; where only the reply's total is known, and is not one per event, it is shared
out among events by how many tokens their texts have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.bench.record import Record, latency_fields
from jaxserve.bench.serving.options import SLO_NAMES
from jaxserve.bench.serving.tokens import Tokens
from jaxserve.bench.serving.work import INTERRUPTED, Outcome


@dataclasses.dataclass(frozen=True)
class Times:
    """Of one request that went well. None: it has no such time."""

    e2e_s: float
    ttft_s: float | None
    tpot_s: float | None
    gaps_s: list[float]
    output_len: int
    input_len: int


def times_of(outcome: Outcome, tokens: Tokens | None, *, streamed: bool = True) -> Times:
    input_len = outcome.prompt_len if outcome.server_prompt_len is None else outcome.server_prompt_len
    if not streamed:
        output_len = outcome.output_len or (tokens.counts([outcome.text])[0] if tokens else 0)
        return Times(outcome.e2e_s, None, None, [], output_len, input_len)
    counts = event_tokens(outcome, tokens)
    output_len = outcome.output_len or round(sum(counts))
    ttft_s = outcome.times_s[0] if outcome.times_s else None
    tpot_s = (outcome.e2e_s - ttft_s) / (output_len - 1) if ttft_s is not None and output_len > 1 else None
    return Times(outcome.e2e_s, ttft_s, tpot_s, token_gaps(outcome.times_s, counts), output_len, input_len)


def event_tokens(outcome: Outcome, tokens: Tokens | None) -> list[int]:
    """How many tokens each event brought."""
    num_events, total = len(outcome.times_s), outcome.output_len
    if num_events and all(outcome.tokens):
        return outcome.tokens
    if not num_events or total == num_events or not outcome.texts:
        return [1] * num_events
    weights = np.maximum(tokens.counts(outcome.texts) if tokens else np.ones(num_events), 1)
    if total is None:
        return [int(weight) for weight in weights]
    # Rounding the running sum keeps the total.
    ends = np.rint(np.cumsum(weights) / np.sum(weights) * total).astype(int)
    return [int(n) for n in np.diff(ends, prepend=0)]


def token_gaps(times_s: Sequence[float], counts: Sequence[int]) -> list[float]:
    """The gap before each token behind the first event. Time of events without a token goes to the next that has one."""
    gaps: list[float] = []
    last_s = times_s[0] if times_s else 0.0
    for time_s, count in zip(times_s[1:], counts[1:], strict=True):
        if count > 0:
            gaps += [(time_s - last_s) / count] * count
            last_s = time_s
    return gaps


def most_at_once(outcomes: Sequence[Outcome]) -> int:
    """Requests that were under way at the same moment."""
    changes = [(one.start_s, 1) for one in outcomes] + [(one.start_s + one.e2e_s, -1) for one in outcomes]
    running = most = 0
    for _, change in sorted(changes):  # of one moment, ends come first
        running += change
        most = max(most, running)
    return most


def most_per_s(moments_s: np.ndarray, weights: np.ndarray | None = None) -> float:
    """The largest sum in one of the seconds after the first moment."""
    if not len(moments_s):
        return 0.0
    seconds = (moments_s - moments_s.min()).astype(np.int64)
    return float(np.bincount(seconds, weights).max())


def failures(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Of each kind how many, and what the first said. What Ctrl-C cut off is no failure."""
    kinds: dict[str, dict[str, Any]] = {}
    for one in outcomes:
        if not one.ok and one.error_kind != INTERRUPTED:
            kinds.setdefault(one.error_kind, {"count": 0, "message": one.error})["count"] += 1
    return kinds


def run_fields(
    outcomes: Sequence[Outcome], start_s: float, tokens: Tokens | None, slo_ms: dict[str, float], *, streamed: bool = True
) -> Record:
    """The numbers of a record."""
    good = [one for one in outcomes if one.ok]
    times = [times_of(one, tokens, streamed=streamed) for one in good]
    duration_s = max((one.start_s + one.e2e_s for one in outcomes), default=start_s) - start_s
    failed = failures(outcomes)
    num_failed = sum(kind["count"] for kind in failed.values())
    fields: Record = {
        "duration": duration_s,
        "completed": len(good),
        "failed": num_failed,
        "failures": failed,
        "not_finished": len(outcomes) - len(good) - num_failed,
        **_throughput(good, times, duration_s, tokens),
        **latency_fields("e2e_latency", [one.e2e_s for one in times]),
        **latency_fields("ttft", [one.ttft_s for one in times if one.ttft_s is not None]),
        **latency_fields("tpot", [one.tpot_s for one in times if one.tpot_s is not None]),
    }
    gaps = np.array([gap for one in times for gap in one.gaps_s])
    fields |= latency_fields("itl", gaps) | {"max_itl_ms": float(gaps.max() * 1e3) if len(gaps) else None}
    fields["concurrency"] = sum(one.e2e_s for one in times) / duration_s if duration_s else None
    fields["max_concurrent_requests"] = most_at_once(good)
    steps = sum(one.verify_steps for one in good)
    fields["accept_length"] = sum(one.output_len or 0 for one in good if one.verify_steps) / steps if steps else None
    if any(one.cached_tokens is not None for one in good):
        fields["cache_report"] = _cache_report(good, times)
    if slo_ms:
        fields |= _goodput(times, len(good) + num_failed, duration_s, slo_ms)
    return fields


def _throughput(good: list[Outcome], times: list[Times], duration_s: float, tokens: Tokens | None) -> Record:
    total_in, total_out = sum(one.input_len for one in times), sum(one.output_len for one in times)
    fields: Record = {"total_input_tokens": total_in, "total_output_tokens": total_out}
    fields["total_output_tokens_retokenized"] = sum(tokens.counts([one.text for one in good])) if tokens else None
    per_s = 1 / duration_s if duration_s else 0.0
    fields["request_throughput"] = len(good) * per_s
    fields["input_throughput"], fields["output_throughput"] = total_in * per_s, total_out * per_s
    fields["total_throughput"] = (total_in + total_out) * per_s
    moments = np.array([one.start_s + time_s for one in good for time_s in one.times_s])
    counts = np.array([count for one in good for count in event_tokens(one, tokens)])
    fields["max_output_tokens_per_s"] = most_per_s(moments, counts)
    return fields


def _cache_report(good: list[Outcome], times: list[Times]) -> Record:
    prompt, cached = sum(one.input_len for one in times), sum(one.cached_tokens or 0 for one in good)
    rate = round(100 * cached / prompt, 2) if prompt else 0.0
    return {"total_prompt_tokens": prompt, "total_cached_tokens": cached, "cache_hit_rate_pct": rate}


def _goodput(times: list[Times], num_ended: int, duration_s: float, slo_ms: dict[str, float]) -> Record:
    """A request without such a time (one token has no TPOT) cannot miss its limit; a failed one misses."""

    def kept(one: Times) -> bool:
        values = ((getattr(one, SLO_NAMES[name]), limit_ms) for name, limit_ms in slo_ms.items())
        return all(value is None or value * 1e3 <= limit_ms for value, limit_ms in values)

    num = sum(kept(one) for one in times)
    return {
        "slo_ms": slo_ms,
        "goodput": num / duration_s if duration_s else 0.0,
        "slo_attainment": num / num_ended if num_ended else 0.0,
    }


def detail_fields(outcomes: Sequence[Outcome], start_s: float, tokens: Tokens | None, *, streamed: bool = True) -> Record:
    """Lists with an entry per request (record.DETAILS)."""
    times = [
        times_of(one, tokens, streamed=streamed) if one.ok else Times(0.0, None, None, [], 0, one.prompt_len)
        for one in outcomes
    ]
    return {
        "input_lens": [one.input_len for one in times],
        "output_lens": [one.output_len for one in times],
        "ttfts": [one.ttft_s or 0.0 for one in times],
        "itls": [one.gaps_s for one in times],
        "e2e_latencies": [one.e2e_s for one in times],
        "start_times": [one.start_s - start_s for one in outcomes],
        "cached_tokens": [one.cached_tokens for one in outcomes],
        "generated_texts": [one.text for one in outcomes],
        "errors": [f"{one.error_kind}: {one.error}" if one.error_kind else "" for one in outcomes],
    }
