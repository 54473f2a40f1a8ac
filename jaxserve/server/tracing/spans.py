"""Spans from what was written down of a request, in opentelemetry's types. Names of attributes are those of OpenTelemetry's
conventions for GenAI and HTTP where they have one.

    POST /v1/chat/completions
      chat MODEL                          (of a request with several: sequence 0, sequence 1, ...)
        tokenize, dispatch, grammar, queue, prefill (chunk ...), decode, answer

Level 1 has the two outer ones, 2 their parts, 3 chunks of prefill as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from jaxserve.server.tracing.context import TraceContext
from jaxserve.server.tracing.records import CallTrace, HttpTrace
from jaxserve.server.version import package_version
from jaxserve.timeline import RequestTimeline, RequestTimes

MAIN, SCHEDULER, DETOKENIZER = "main", "scheduler", "detokenizer, main"


class SpanMaker:
    def __init__(self) -> None:
        self._resource = Resource.create({"service.version": package_version()} | _default_name())
        self._scope = InstrumentationScope("jaxserve", package_version())

    def spans_of(self, record: HttpTrace | CallTrace) -> list[ReadableSpan]:
        return [self._http(record)] if isinstance(record, HttpTrace) else list(self._call(record))

    def _http(self, http: HttpTrace) -> ReadableSpan:
        attributes = {"http.request.method": http.method, "url.path": http.path}
        failed = http.status_code >= 500
        return self._span(
            f"{http.method} {http.path}",
            http.own,
            http.parent,
            http.started_s,
            http.ended_s,
            attributes | ({"http.response.status_code": http.status_code} if http.status_code else {}),
            kind=SpanKind.SERVER,
            error=str(http.status_code) if failed else "",
        )

    def _call(self, call: CallTrace) -> Iterator[ReadableSpan]:
        lines = [call.timelines[index] for index in sorted(call.timelines)]
        error = next((str(line.status_code) for line in lines if line.status_code is not None), "")
        yield self._span(
            call.name,
            call.own,
            call.parent,
            min(line.received_s for line in lines),
            max(line.answered_s for line in lines),
            {
                **call.attributes,
                "gen_ai.response.finish_reasons": tuple(line.finish for line in lines),
                "gen_ai.usage.output_tokens": sum(line.completion_tokens for line in lines),
                **(_of_sequence(lines[0]) if len(lines) == 1 else {"gen_ai.usage.input_tokens": _prompt_tokens(lines)}),
            },
            events=_first_text(lines[0]) if len(lines) == 1 else (),
            error=error,
        )
        for index, line in enumerate(lines):
            parent = call.own
            if len(lines) > 1:
                parent = call.own.child()
                attributes = _of_sequence(line) | {
                    "gen_ai.response.finish_reasons": (line.finish,),
                    "gen_ai.usage.output_tokens": line.completion_tokens,
                }
                error = "" if line.status_code is None else str(line.status_code)
                yield self._span(
                    f"sequence {index}",
                    parent,
                    call.own,
                    line.received_s,
                    line.answered_s,
                    attributes,
                    _first_text(line),
                    error,
                )
            if call.level > 1:
                yield from self._stages(line, parent, chunks=call.level > 2)

    def _stages(self, line: RequestTimeline, parent: TraceContext, *, chunks: bool) -> Iterator[ReadableSpan]:
        times = line.scheduler or RequestTimes()

        def stage(name: str, process: str, begin_s: float, end_s: float, **more: Any) -> Iterator[ReadableSpan]:
            if begin_s and end_s:
                attributes = {"jaxserve.process": process, **more}
                yield self._span(name, parent.child(), parent, begin_s, end_s, attributes)

        yield from stage("tokenize", MAIN, line.received_s, line.sent_s)
        yield from stage("dispatch", MAIN, line.sent_s, times.queue_entry_s)
        yield from stage("grammar", SCHEDULER, times.queue_entry_s, times.grammar_ready_s)
        waiting_s = times.grammar_ready_s or times.queue_entry_s
        yield from stage("queue", SCHEDULER, waiting_s, times.first_scheduled_s or times.finished_s)
        yield from self._prefill(times, parent, chunks=chunks)
        if times.first_token_s and times.finished_s:
            attributes = {
                "jaxserve.process": SCHEDULER,
                "jaxserve.retractions": times.num_retractions,
                "jaxserve.jumps": times.num_jumps,
                "jaxserve.accepted_drafts": times.accepted_drafts,
            }
            events = [Event("retracted", timestamp=_ns(at_s)) for at_s in times.retractions_s]
            yield self._span("decode", parent.child(), parent, times.first_token_s, times.finished_s, attributes, events)
        yield from stage("answer", DETOKENIZER, times.finished_s, line.answered_s)

    def _prefill(self, times: RequestTimes, parent: TraceContext, *, chunks: bool) -> Iterator[ReadableSpan]:
        end_s = times.first_token_s or times.finished_s
        if not times.first_scheduled_s or not end_s:
            return
        own = parent.child()
        attributes = {"jaxserve.process": SCHEDULER, "jaxserve.prefill_chunks": times.num_chunks}
        yield self._span("prefill", own, parent, times.first_scheduled_s, end_s, attributes)
        for chunk in times.chunks if chunks else ():
            # What was computed again after a retraction lies behind the first token.
            at = own if chunk.start_s < end_s else parent
            yield self._span(
                "chunk", own.child(), at, chunk.start_s, chunk.end_s or end_s, {"jaxserve.tokens": chunk.num_tokens}
            )

    def _span(
        self,
        name: str,
        own: TraceContext,
        parent: TraceContext | None,
        begin_s: float,
        end_s: float,
        attributes: dict[str, Any],
        events: Any = (),
        error: str = "",
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> ReadableSpan:
        return ReadableSpan(
            name=name,
            context=_span_context(own, is_remote=False),
            parent=None if parent is None or not parent.span_id else _span_context(parent, is_remote=kind is SpanKind.SERVER),
            resource=self._resource,
            attributes=attributes | ({"error.type": error} if error else {}),
            events=tuple(events),
            kind=kind,
            status=Status(StatusCode.ERROR) if error else Status(),
            start_time=_ns(begin_s),
            end_time=max(_ns(begin_s), _ns(end_s)),
            instrumentation_scope=self._scope,
        )


def _default_name() -> dict[str, str]:
    """The environment's name wins, which Resource.create would let ours do."""
    return {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "jaxserve"}


def _of_sequence(line: RequestTimeline) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.response.id": line.rid,
        "gen_ai.usage.input_tokens": line.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": line.cached_tokens,
        "gen_ai.latency.e2e": line.answered_s - line.received_s,
    }
    times = line.scheduler
    if times is not None and times.first_scheduled_s:
        found["gen_ai.latency.time_in_queue"] = max(0.0, times.first_scheduled_s - times.queue_entry_s)
    if times is not None and times.first_token_s:
        found["gen_ai.latency.time_to_first_token"] = max(0.0, times.first_token_s - line.received_s)
    return found


def _prompt_tokens(lines: list[RequestTimeline]) -> int:
    """Of each prompt once."""
    return sum(line.prompt_tokens for line in lines[:: max(1, lines[0].num_samples)])


def _first_text(line: RequestTimeline) -> list[Event]:
    return [Event("first text", timestamp=_ns(line.first_text_s))] if line.first_text_s else []


def _span_context(context: TraceContext, *, is_remote: bool) -> SpanContext:
    state = TraceState.from_header([context.tracestate]) if context.tracestate else None
    return SpanContext(context.trace_id, context.span_id, is_remote, TraceFlags(1 if context.is_sampled else 0), state)


def _ns(unix_s: float) -> int:
    return int(unix_s * 1e9)
