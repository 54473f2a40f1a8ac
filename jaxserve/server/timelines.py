"""Time lines of requests as they end: who is told of them, which are kept, and what a reply says of its own.

LiveTable -> Timelines.observe -> metrics, traces, the log; the newest are kept for the dashboard
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import Any

from jaxserve.timeline import RequestTimeline

logger = logging.getLogger(__name__)

Observer = Callable[[RequestTimeline], None]

# Kept for the dashboard.
MAX_RECENT = 200


class Timelines:
    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self._recent: collections.deque[RequestTimeline] = collections.deque(maxlen=MAX_RECENT)

    def observe(self, timeline: RequestTimeline) -> None:
        """A sequence has ended. An observer that fails costs nobody else anything."""
        self._recent.append(timeline)
        for observer in self.observers:
            try:
                observer(timeline)
            except Exception:
                logger.exception("The time line of request %s could not be observed.", timeline.rid)

    @property
    def recent(self) -> list[RequestTimeline]:
        """Of those that have ended, the newest last."""
        return list(self._recent)


def meta_of(timeline: RequestTimeline) -> dict[str, Any]:
    """SGLang's keys of meta_info about its way, times and drafts, as far as the request got."""
    times, received_s = timeline.scheduler, timeline.received_s
    meta: dict[str, Any] = {
        "e2e_latency": timeline.answered_s - received_s,
        "num_retractions": times.num_retractions if times else 0,
        "request_received_ts": received_s,
        "response_sent_to_client_ts": timeline.answered_s,
    }
    if timeline.sent_s:
        meta["api_server_dispatch_finish_ts"] = timeline.sent_s
    if timeline.dp_rank is not None:
        meta["dp_rank"] = timeline.dp_rank
    if times is None:
        return meta
    meta["request_finished_ts"] = times.finished_s
    if times.first_scheduled_s:
        meta["forward_entry_time"] = times.first_scheduled_s
        meta["queue_time"] = max(0.0, times.first_scheduled_s - times.queue_entry_s)
    if times.first_token_s:
        meta["prefill_finished_time"] = times.first_token_s
        meta["first_token_latency"] = max(0.0, times.first_token_s - received_s)
        decode_s = times.finished_s - times.first_token_s
        if timeline.completion_tokens > 1 and decode_s > 0:
            meta["decode_throughput"] = (timeline.completion_tokens - 1) / decode_s
    if times.verify_steps:
        meta["spec_verify_ct"] = times.verify_steps
        meta["spec_accept_length"] = timeline.completion_tokens / times.verify_steps
        meta["spec_accept_rate"] = times.accepted_drafts / times.proposed_drafts
        meta["spec_accept_token_num"], meta["spec_draft_token_num"] = times.accepted_drafts, times.proposed_drafts
    return meta


def log_times(timeline: RequestTimeline) -> None:
    """SGLang's request time stats: one line for each sequence that has ended."""
    parts = [f"{name}={value:.6g}" for name, value in durations(timeline).items()]
    counts = f"prompt_tokens={timeline.prompt_tokens}, cached_tokens={timeline.cached_tokens}, "
    counts += f"completion_tokens={timeline.completion_tokens}, finish={timeline.finish}"
    logger.info("Request times: rid=%r, %s, %s", timeline.rid, counts, ", ".join(parts))


def durations(timeline: RequestTimeline) -> dict[str, float]:
    """Seconds that the parts of a request's life took, as far as it got, in their order; the last is all of it."""
    found: dict[str, float] = {}

    def add(name: str, start_s: float, end_s: float) -> None:
        if start_s and end_s:
            found[name] = max(0.0, end_s - start_s)

    times = timeline.scheduler
    add("tokenize", timeline.received_s, timeline.sent_s)
    if times is not None:
        add("dispatch", timeline.sent_s, times.queue_entry_s)
        add("grammar_wait", times.queue_entry_s, times.grammar_ready_s)
        add("queue_time", times.queue_entry_s, times.first_scheduled_s)
        add("prefill", times.first_scheduled_s, times.first_token_s)
        add("decode", times.first_token_s, times.finished_s)
        add("return", times.finished_s, timeline.answered_s)
        add("first_token_latency", timeline.received_s, times.first_token_s)
    add("e2e_latency", timeline.received_s, timeline.answered_s)
    return found
