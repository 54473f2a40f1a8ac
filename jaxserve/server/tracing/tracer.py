"""Tracer: begins the traces of HTTP requests and of what they ask the engine for, and hands over what has ended."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Mapping
from typing import Any

from jaxserve.config import ServerArgs
from jaxserve.server.requests import GenerateReqInput
from jaxserve.server.tracing.context import TraceContext
from jaxserve.server.tracing.records import Attribute, CallTrace, HttpTrace
from jaxserve.server.tracing.sender import MakeExporter, TraceSender

LEVELS = (0, 1, 2, 3)  # nothing; requests; and their parts; and chunks of prefill
_CHATS = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"})
_current: contextvars.ContextVar[HttpTrace | None] = contextvars.ContextVar("http_trace", default=None)


class Tracer:
    def __init__(self, args: ServerArgs, make_exporter: MakeExporter | None = None) -> None:
        """Raises ValueError if what it needs is not installed."""
        self.level = LEVELS[-1]
        self._model = args.effective_served_model_name
        self._sender = TraceSender(args.otlp_traces_endpoint, make_exporter)

    @staticmethod
    def of(args: ServerArgs) -> Tracer | None:
        return Tracer(args) if args.enable_trace else None

    def close(self) -> None:
        self._sender.close()

    # --- HTTP

    def begin_http(self, method: str, path: str, headers: Mapping[str, str]) -> HttpTrace | None:
        """From now on what this task asks the engine for belongs to it."""
        if not self.level:
            return None
        parent = TraceContext.of(headers)
        http = HttpTrace(parent, (parent or TraceContext.new()).child(), method, path, time.time())
        _current.set(http)
        return http

    def end_http(self, http: HttpTrace) -> None:
        if http.is_used and http.own.is_sampled:
            http.ended_s = time.time()
            self._sender.put(http)

    # --- the engine

    def begin(self, req: GenerateReqInput) -> CallTrace | None:
        http, given = _current.get(), TraceContext.of(req.trace_headers)
        if not self.level or req.is_health_check:
            return None
        if http is not None:
            if given is not None and not http.is_used:
                http.adopt(given)
            http.is_used = True
        parent = http.own if http is not None else given
        own = (parent or TraceContext.new()).child()
        if not own.is_sampled:
            return None
        operation = "chat" if http is not None and http.path in _CHATS else "text_completion"
        return CallTrace(
            parent=parent,
            own=own,
            name=f"{operation} {self._model}",
            attributes=self._attributes(req, operation),
            num_left=req.num_sequences,
            level=self.level,
            done=self._sender.put,
        )

    def _attributes(self, req: GenerateReqInput, operation: str) -> dict[str, Attribute]:
        params = req.sampling_params[0]
        given: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "jaxserve",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.max_tokens": params.max_new_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
            "gen_ai.request.seed": params.sampling_seed,
            "gen_ai.request.choice.count": req.num_samples if req.num_samples > 1 else None,
            "gen_ai.request.stream": req.stream,
            "jaxserve.prompts": req.num_prompts if req.num_prompts > 1 else None,
        }
        return {name: value for name, value in given.items() if value is not None}
