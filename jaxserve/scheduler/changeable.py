"""Which options a running scheduler can follow. The rest is compiled in, or divides memory that is taken."""

from __future__ import annotations

from typing import Any

from jaxserve.config import ServerArgs

CHANGEABLE = ("request_waiting_timeout_s", "request_running_timeout_s", "max_queued_requests", "decode_log_interval")


def changeable(args: ServerArgs) -> dict[str, Any]:
    return {name: getattr(args, name) for name in CHANGEABLE}
