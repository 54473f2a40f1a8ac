"""W3C trace context: which span of which trace a request belongs to, as `traceparent` and `tracestate` say it."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping
from typing import Any

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_MAX_STATE_CHARS = 512
_SAMPLED = 1


@dataclasses.dataclass(frozen=True, slots=True)
class TraceContext:
    trace_id: int
    span_id: int  # 0: no span yet, the next is a root
    is_sampled: bool = True
    tracestate: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED if self.is_sampled else 0:02x}"

    def child(self) -> TraceContext:
        return dataclasses.replace(self, span_id=new_span_id())

    @staticmethod
    def new() -> TraceContext:
        return TraceContext(random.getrandbits(128) or 1, 0)

    @staticmethod
    def of(headers: Mapping[str, Any] | None) -> TraceContext | None:
        """None where they name no trace; what is not of the standard's form names none, as the standard has it."""
        parent = headers.get(TRACEPARENT) if headers else None
        found = _FORM.fullmatch(parent.strip()) if isinstance(parent, str) else None
        if found is None:
            return None
        version, trace_id, span_id, flags, more = found.groups()
        if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
            return None
        state = headers.get(TRACESTATE) if headers else None
        is_usable = isinstance(state, str) and state.isascii() and state.isprintable() and len(state) <= _MAX_STATE_CHARS
        is_sampled = bool(int(flags, 16) & _SAMPLED)
        return TraceContext(int(trace_id, 16), int(span_id, 16), is_sampled, str(state) if is_usable else "")


def new_span_id() -> int:
    return random.getrandbits(64) or 1
