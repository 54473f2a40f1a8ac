"""What operators and routers ask of a running server: its description, its load, flushing the cache, aborting requests.

`admin_router` holds the endpoints the admin key protects; `router` the others.
"""

from __future__ import annotations

import datetime
import time
from typing import Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse

from jaxserve.config import ServerArgs
from jaxserve.server.http.body import read_struct
from jaxserve.server.http.docs import json_body
from jaxserve.server.http.service import service_of
from jaxserve.server.requests import RequestError
from jaxserve.server.version import package_version

# What a load report takes from the scheduler's state, under the same names.
_CORE_LOADS = (
    "num_running_reqs",
    "num_waiting_reqs",
    "num_used_tokens",
    "max_total_num_tokens",
    "max_running_requests",
    "token_usage",
    "last_gen_throughput",
)
_LOAD_SECTIONS = ("core", "all")

router = APIRouter(tags=["control"])
admin_router = APIRouter(tags=["control"])


class AbortRequest(msgspec.Struct):
    """POST /abort_request. One of the two must be given."""

    rid: str | None = None
    abort_all: bool | None = None


_abort_decoder = msgspec.json.Decoder(AbortRequest)


def _args(request: Request) -> ServerArgs:
    args: ServerArgs = request.app.state.args
    return args


@router.get("/model_info")
@router.get("/get_model_info", deprecated=True)
async def model_info(request: Request) -> dict[str, Any]:
    """What is served: paths, names, kind of model."""
    return {"load_format": _args(request).load_format, **service_of(request).model_info}


@router.get("/server_info")
@router.get("/get_server_info", deprecated=True)
async def server_info(request: Request) -> dict[str, Any]:
    """Every option in force (secrets masked, what was "auto" resolved), the version, and the scheduler's state."""
    return {
        **_args(request).public_dict(),
        **service_of(request).resolved_options,
        "version": package_version(),
        "status": service_of(request).status,
        "uptime_s": time.monotonic() - request.app.state.started_monotonic_s,
        "internal_states": [await service_of(request).internal_state()],
    }


@router.get("/v1/loads")
async def loads(request: Request, include: str | None = None, dp_rank: int | None = None) -> dict[str, Any]:
    """How busy each replica is; for routers and dashboards."""
    for section in (include or "all").split(","):
        if section.strip() not in _LOAD_SECTIONS:
            raise RequestError(f"include must name sections of {', '.join(_LOAD_SECTIONS)}, got {section!r}.", param="include")
    if dp_rank not in (None, 0):
        raise RequestError(f"dp_rank must be 0 (there is one replica), got {dp_rank}.", param="dp_rank")
    state = await service_of(request).internal_state()
    core = {name: state[name] for name in _CORE_LOADS if name in state}
    return {
        "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
        "version": package_version(),
        "loads": [{"dp_rank": 0, **core, "num_live_sequences": service_of(request).num_live}],
    }


@admin_router.get("/flush_cache", include_in_schema=False)
@admin_router.post("/flush_cache")
async def flush_cache(request: Request, timeout: float = Query(0.0, ge=0, le=3600)) -> Response:
    """Forgets all cached prefixes. Needs an idle scheduler; `timeout` seconds are spent waiting for it."""
    success, message = await service_of(request).flush_cache(timeout)
    text = message or ("Cache flushed." if success else "The cache was not flushed.")
    return PlainTextResponse(text.rstrip("\n") + "\n", status_code=200 if success else 400)


@admin_router.post("/abort_request", response_class=Response, openapi_extra=json_body(AbortRequest))
async def abort_request(request: Request) -> Response:
    """Aborts the requests whose id begins with `rid`, or all. Each still gets its last reply; an unknown id is no error."""
    body = await read_struct(request, _abort_decoder)
    if body.abort_all:
        service_of(request).abort_all()
    elif body.rid:
        service_of(request).abort(body.rid)
    else:
        raise RequestError("rid (a prefix of request ids) or abort_all: true is required.", param="rid")
    return Response(status_code=200)
