"""Traces of requests: the tree of spans, the context in and out, and a collector that is not there."""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from server_process import Server, serving

from jaxserve.config import ServerArgs
from jaxserve.server.requests import GenerateReqInput
from jaxserve.server.tracing import TraceContext, Tracer
from jaxserve.timeline import PrefillChunk, RequestTimeline, RequestTimes
from jaxserve.types import SamplingParams

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


def timeline(rid: str, **changes: Any) -> RequestTimeline:
    """Queued at 2, prefilled from 3 to 5 in two chunks, retracted at 6, ended at 9."""
    chunks = [PrefillChunk(3.0, 4.0, 8), PrefillChunk(4.0, 5.0, 3), PrefillChunk(6.5, 7.0, 12)]
    times = RequestTimes(
        queue_entry_s=1.5, grammar_ready_s=2.0, first_scheduled_s=3.0, first_token_s=5.0, finished_s=9.0, chunks=chunks,
        num_chunks=3, retractions_s=[6.0], num_retractions=1,
    )  # fmt: skip
    values: dict[str, Any] = {"received_s": 1.0, "sent_s": 1.25, "first_text_s": 5.25, "answered_s": 9.5, "finish": "stop"}
    values |= {"prompt_tokens": 11, "completion_tokens": 4, "cached_tokens": 1, "scheduler": times}
    return RequestTimeline(rid=rid, **values | changes)


def traced(lines: Sequence[RequestTimeline], level: int = 3, **fields: Any) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracer = Tracer(ServerArgs(model_path="m", enable_trace=True), lambda: exporter)
    tracer.level = level
    params = [SamplingParams(n=len(lines), temperature=0.5)]
    call = tracer.begin(GenerateReqInput(prompts=["the secret"], sampling_params=params, **fields))
    assert call is not None
    for index, line in reversed(list(enumerate(lines))):
        call.ended(index, line)
    tracer.close()
    return list(exporter.get_finished_spans())


def tree(spans: Sequence[ReadableSpan]) -> dict[str, str]:
    """Names, and those of their parents."""
    names = {span.context.span_id: span.name for span in spans}
    return {span.name: "" if span.parent is None else names.get(span.parent.span_id, "?") for span in spans}


def test_one_sequence() -> None:
    spans = traced([timeline("r")])
    assert len({span.context.trace_id for span in spans}) == 1
    call = "text_completion m"
    assert tree(spans) == {
        call: "", "tokenize": call, "dispatch": call, "grammar": call, "queue": call, "prefill": call, "chunk": call,
        "decode": call, "answer": call,
    }  # fmt: skip
    at = {span.name: (span.start_time / 1e9, span.end_time / 1e9) for span in spans if span.name != "chunk"}
    assert at == {
        call: (1.0, 9.5), "tokenize": (1.0, 1.25), "dispatch": (1.25, 1.5), "grammar": (1.5, 2.0), "queue": (2.0, 3.0),
        "prefill": (3.0, 5.0), "decode": (5.0, 9.0), "answer": (9.0, 9.5),
    }  # fmt: skip
    prefill = next(span for span in spans if span.name == "prefill")
    chunks = [span for span in spans if span.name == "chunk"]
    assert [span.attributes["jaxserve.tokens"] for span in chunks] == [8, 3, 12]
    assert [span.parent.span_id == prefill.context.span_id for span in chunks] == [True, True, False]
    decode = next(span for span in spans if span.name == "decode")
    assert [(event.name, event.timestamp) for event in decode.events] == [("retracted", 6_000_000_000)]
    attributes = dict(spans[0].attributes)
    assert attributes["gen_ai.request.model"] == "m" and attributes["gen_ai.request.temperature"] == 0.5
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (11, 4)
    assert attributes["gen_ai.latency.time_to_first_token"] == 4.0 and attributes["gen_ai.latency.time_in_queue"] == 1.5
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert "secret" not in "".join(span.to_json() for span in spans)
    assert spans[0].resource.attributes["service.name"] == "jaxserve"


def test_several_sequences_are_children_of_one() -> None:
    lines = [timeline("a", num_samples=2), timeline("b", num_samples=2, finish="abort", status_code=503)]
    spans = traced(lines, level=1, trace_headers={"traceparent": PARENT, "tracestate": "a=1"})
    assert tree(spans) == {"text_completion m": "?", "sequence 0": "text_completion m", "sequence 1": "text_completion m"}
    call, first, second = spans
    assert (f"{call.context.trace_id:032x}", f"{call.parent.span_id:016x}") == (TRACE, SPAN)
    assert call.context.trace_state.to_header() == "a=1"
    assert (call.attributes["gen_ai.usage.input_tokens"], call.attributes["gen_ai.usage.output_tokens"]) == (11, 8)
    assert call.attributes["gen_ai.request.choice.count"] == 2
    assert first.status.is_ok and not second.status.is_ok and second.attributes["error.type"] == "503"


def test_levels() -> None:
    assert [len(traced([timeline("r")], level)) for level in (1, 2, 3)] == [1, 8, 11]
    refused = timeline("r", scheduler=None, first_text_s=0.0, sent_s=0.0)
    assert [span.name for span in traced([refused])] == ["text_completion m"]
    tracer = Tracer(ServerArgs(model_path="m", enable_trace=True))
    request = GenerateReqInput(prompts=["a"], sampling_params=[SamplingParams()])
    request.trace_headers = {"traceparent": PARENT[:-1] + "0"}
    assert tracer.begin(request) is None, "its client does not sample it"
    tracer.level, request.trace_headers = 0, None
    assert tracer.begin(request) is None


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"traceparent": PARENT}, PARENT),
        ({"traceparent": f" {PARENT} ", "tracestate": "x" * 513}, PARENT),
        ({"traceparent": PARENT.replace("00-", "cc-", 1) + "-later"}, PARENT),
        ({"traceparent": PARENT[:-2] + "00"}, PARENT[:-2] + "00"),
        ({"traceparent": PARENT + "-more"}, None),
        ({"traceparent": PARENT.upper()}, None),
        ({"traceparent": PARENT.replace("00-", "ff-", 1)}, None),
        ({"traceparent": f"00-{'0' * 32}-{SPAN}-01"}, None),
        ({"traceparent": f"00-{TRACE}-{'0' * 16}-01"}, None),
        ({"traceparent": "\u0661" * 55}, None),
        ({"tracestate": "a=1"}, None),
        (None, None),
    ],
)
def test_the_context_that_comes(headers: dict[str, str] | None, expected: str | None) -> None:
    context = TraceContext.of(headers)
    assert (context and context.traceparent) == expected


class Broken(InMemorySpanExporter):
    """A collector that comes and goes, and takes its time."""

    is_there = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        time.sleep(0.3)
        if not self.is_there:
            raise ConnectionError("nobody")
        return super().export(spans)


def test_a_collector_that_is_away_costs_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = Broken()
    monkeypatch.setattr("jaxserve.server.tracing.sender._GATHER_S", 0.01)
    monkeypatch.setattr("jaxserve.server.tracing.sender._MAX_WAITING", 10)
    tracer = Tracer(ServerArgs(model_path="m", enable_trace=True, otlp_traces_endpoint="there:1"), lambda: exporter)
    request = GenerateReqInput(prompts=["a"], sampling_params=[SamplingParams()])

    def send() -> None:
        call = tracer.begin(request)
        assert call is not None
        call.ended(0, timeline("r"))

    with caplog.at_level(logging.INFO):
        begun_s = time.monotonic()
        for _ in range(1000):
            send()
        assert time.monotonic() - begun_s < 0.3, "nobody waits"
        time.sleep(0.7)
        exporter.is_there = True
        send()
        tracer.close()
    away, back = caplog.messages
    assert away == "Traces cannot be sent to there:1: ConnectionError: nobody; they are lost until that works again."
    assert back.startswith("Traces are sent to there:1 again; ") and exporter.get_finished_spans()


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--enable-trace needs .*: pip install 'jaxserve\[tracing\]'"):
        Tracer(ServerArgs(model_path="m", enable_trace=True))
    assert Tracer.of(ServerArgs(model_path="m")) is None


# --- a server in processes of its own, and a collector


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.changed = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self.changed:
            for resource in request.resource_spans:
                assert any(one.key == "service.name" for one in resource.resource.attributes)
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
            self.changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def until(self, condition: Callable[[list[Any]], Any]) -> list[Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self.spans), 30), [span.name for span in self.spans]
            spans, self.spans = self.spans, []
        return spans


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Collector, int]]:
    servicer, server = Collector(), grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, port
    server.stop(None)


@pytest.fixture(scope="module")
def server(collector: tuple[Collector, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("traced")
    endpoint = f"127.0.0.1:{collector[1]}"
    with serving(folder, enable_trace=True, otlp_traces_endpoint=endpoint, served_model_name="demo") as server:
        server.wait_for("/ready", 200)
        yield server
        server.stop()


MESSAGES = [{"role": "user", "content": "the secret"}]
ROUTES = {
    "/generate": {"text": "the secret", "sampling_params": {"max_new_tokens": 3}},
    "/v1/completions": {"model": "demo", "prompt": ["the secret", "b"], "max_tokens": 3, "n": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3, "stream": True},
    "/v1/responses": {"input": "the secret", "max_output_tokens": 3},
    "/v1/messages": {"model": "demo", "messages": MESSAGES, "max_tokens": 3},
    "/api/chat": {"model": "demo", "messages": MESSAGES, "options": {"num_predict": 3}},
    "/api/generate": {"model": "demo", "prompt": "the secret", "options": {"num_predict": 3}, "stream": False},
}


@pytest.mark.parametrize("path", ROUTES)
def test_every_protocol(server: Server, collector: tuple[Collector, int], path: str) -> None:
    """The client's span, that of HTTP, the request's, the sequences', their parts: one trace over all processes."""
    body = json.loads(json.dumps(ROUTES[path]))
    reply = httpx.post(f"{server.url}{path}", json=body, headers={"traceparent": PARENT, "tracestate": "v=1"}, timeout=60)
    assert reply.status_code == 200, reply.text
    num_sequences = 4 if path == "/v1/completions" else 1
    spans = collector[0].until(
        lambda spans: sum(s.name == "answer" for s in spans) == num_sequences and any(s.name.startswith("POST") for s in spans)
    )
    names = {span.span_id: span.name for span in spans}
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    http = next(span for span in spans if span.name == f"POST {path}")
    assert (http.parent_span_id.hex(), http.trace_state) == (SPAN, "v=1")
    assert reply.headers["traceparent"] == f"00-{TRACE}-{http.span_id.hex()}-01"
    assert reply.headers["tracestate"] == "v=1"
    operation = "chat" if path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat") else "text_completion"
    (call,) = [span for span in spans if names.get(span.parent_span_id) == http.name]
    assert call.name.startswith(f"{operation} ")
    sequences = [span for span in spans if span.name.startswith("sequence ")] if num_sequences > 1 else [call]
    assert len(sequences) == num_sequences
    for sequence in sequences:
        parts = {span.name for span in spans if span.parent_span_id == sequence.span_id}
        assert {"tokenize", "dispatch", "queue", "prefill", "decode", "answer"} <= parts
    assert "secret" not in str(spans)


def test_a_new_trace_and_what_is_not_traced(server: Server, collector: tuple[Collector, int]) -> None:
    body = ROUTES["/generate"]
    for path in ("/health", "/model_info", "/ready"):
        assert "traceparent" not in httpx.get(f"{server.url}{path}").headers
    unsampled = httpx.post(f"{server.url}/generate", json=body, headers={"traceparent": PARENT[:-2] + "00"})
    assert unsampled.headers["traceparent"].endswith("-00") and unsampled.headers["traceparent"][3:35] == TRACE
    given = httpx.post(f"{server.url}/generate", json={**body, "external_trace_header": {"traceparent": PARENT}})
    assert given.headers["traceparent"][3:35] == TRACE
    refused = httpx.post(f"{server.url}/generate", json={**body, "sampling_params": {"max_new_tokens": 1 << 20}})
    assert refused.status_code == 400
    fresh = httpx.post(f"{server.url}/generate", json=body)
    trace = fresh.headers["traceparent"][3:35]
    spans = collector[0].until(lambda spans: any(s.name.startswith("POST") and s.trace_id.hex() == trace for s in spans))
    roots = [span for span in spans if span.name == "POST /generate"]
    assert {span.trace_id.hex() for span in roots} >= {TRACE, trace}
    assert not next(span for span in roots if span.trace_id.hex() == trace).parent_span_id
    assert next(span for span in roots if span.trace_id.hex() == TRACE).parent_span_id.hex() == SPAN
    assert httpx.post(f"{server.url}/generate", json={**body, "external_trace_header": "x"}).status_code == 400


def test_the_level_can_be_set(server: Server, collector: tuple[Collector, int]) -> None:
    reply = httpx.post(f"{server.url}/set_trace_level?level=0")
    assert (reply.status_code, reply.text) == (200, "The trace level is 0.\n")
    assert "traceparent" not in httpx.post(f"{server.url}/generate", json=ROUTES["/generate"]).headers
    assert httpx.get(f"{server.url}/set_trace_level?level=4").status_code == 400
    assert httpx.get(f"{server.url}/set_trace_level").text == "The trace level is 0.\n"
    assert httpx.get(f"{server.url}/set_trace_level?level=1").status_code == 200
    collector[0].spans.clear()
    httpx.post(f"{server.url}/generate", json=ROUTES["/generate"])
    names = {span.name for span in collector[0].until(lambda spans: len(spans) >= 2)}
    assert len(names) == 2
