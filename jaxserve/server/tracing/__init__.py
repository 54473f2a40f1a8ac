"""OpenTelemetry traces of requests: a tree of spans for each, made from its time line when it has ended, and sent by a thread.

    TraceMiddleware -> HttpTrace --(context)--> Tracer.begin -> CallTrace <- the time lines of its sequences
                              \\________________________________________/
                                            TraceSender: spans, export

Nothing here knows what was asked or answered. opentelemetry is imported by the thread alone.
"""

from jaxserve.server.tracing.context import TraceContext
from jaxserve.server.tracing.records import CallTrace
from jaxserve.server.tracing.tracer import Tracer

__all__ = ["CallTrace", "TraceContext", "Tracer"]
