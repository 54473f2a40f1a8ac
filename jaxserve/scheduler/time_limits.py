"""TimeLimits: which requests have waited or run for too long. The time of a pause does not count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from jaxserve.config import ServerArgs
from jaxserve.scheduler.req import Req, RequestState

# They are looked at this often; looking at every request in every step would cost more than it gives.
TIMER_INTERVAL_S = 0.05
_QUEUED = (RequestState.COMPILING, RequestState.WAITING)


class TimeLimits:
    def __init__(self, live: Mapping[str, Req], clock: Callable[[], float]) -> None:
        self._live = live
        self._clock = clock
        self._next_look_s = 0.0

    def overdue(self, args: ServerArgs) -> Iterator[tuple[list[Req], str]]:
        """Requests to end, and why; nothing most of the time."""
        now = self._clock()
        if now < self._next_look_s:
            return
        self._next_look_s = now + TIMER_INTERVAL_S
        limit_s = args.request_waiting_timeout_s
        if limit_s is not None:
            late = [
                r for r in self._live.values()
                if r.state in _QUEUED and not r.has_begun and now - r.waiting_since_s > limit_s
            ]  # fmt: skip
            yield late, f"The request waited longer than {limit_s:g} s in the queue."
        most_s = args.request_running_timeout_s
        if most_s is not None:
            late = [r for r in self._live.values() if r.running_since_s and now - r.running_since_s > most_s]
            yield late, f"The request ran longer than {most_s:g} s."

    def leave_out(self, paused_since_s: float) -> None:
        """Nothing that passed since then counts."""
        now = self._clock()
        for req in self._live.values():
            req.waiting_since_s += now - max(req.waiting_since_s, paused_since_s)
            if req.running_since_s:
                req.running_since_s += now - max(req.running_since_s, paused_since_s)
