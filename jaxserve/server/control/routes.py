"""What a running server says about itself: its description and its load. No control request, but made from one's replies."""

from __future__ import annotations

import datetime
import time
from typing import Any

import msgspec
from fastapi import APIRouter, Query, Request, Response

from jaxserve.config import ServerArgs
from jaxserve.scheduler.control.get_internal_state import GetInternalStateReq
from jaxserve.server.foreign_fields import ForeignFields
from jaxserve.server.http.service import service_of
from jaxserve.server.requests import RequestError
from jaxserve.server.version import package_version

# What a load report takes from the scheduler's state: SGLang's name, and the state's.
_CORE_LOADS = {
    "dp_rank": "dp_rank",
    "num_running_reqs": "num_running_reqs",
    "num_waiting_reqs": "num_waiting_reqs",
    "num_used_tokens": "num_used_tokens",
    "max_total_num_tokens": "max_total_num_tokens",
    "max_running_requests": "max_running_requests",
    "token_usage": "token_usage",
    "gen_throughput": "last_gen_throughput",
    "cache_hit_rate": "cache_hit_rate",
}
_QUEUES = {
    "waiting": "num_waiting_reqs",
    "grammar": "num_grammar_queue_reqs",
    "paused": "num_paused_reqs",
    "retracted": "num_retracted_reqs",
}
_SPECULATIVE = {"accept_length": "avg_spec_accept_length", "accept_rate": "spec_accept_rate"}
# Of these, memory, lora and disagg have nothing to say here. Routers ask for them by name, and take what comes.
_LOAD_SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
_MOST_RECENT = 1000
_FOREIGN_LOADS = ForeignFields({"format": ("json",)})  # SGLang's also is prometheus

router = APIRouter(tags=["control"])


def _args(request: Request) -> ServerArgs:
    args: ServerArgs = request.app.state.args
    return args


async def _internal_states(request: Request) -> list[dict[str, Any]]:
    """One per replica that serves, by rank."""
    return [reply.internal_state for reply in await service_of(request).control(GetInternalStateReq())]


@router.get("/model_info")
@router.get("/get_model_info", deprecated=True)
async def model_info(request: Request) -> dict[str, Any]:
    """What is served: paths, names, kind of model."""
    return {"load_format": _args(request).load_format, **service_of(request).model_info}


@router.get("/server_info")
@router.get("/get_server_info", deprecated=True)
async def server_info(request: Request) -> dict[str, Any]:
    """Every option in force (secrets masked, what was "auto" resolved), the version, and the scheduler's state."""
    states = await _internal_states(request)
    return {
        **_args(request).public_dict(),
        **service_of(request).resolved_options,
        "version": package_version(),
        "kv_events": _args(request).describe_kv_events(states[0]["page_size"]),
        "status": service_of(request).status,
        "replicas": service_of(request).replica_states,
        "uptime_s": time.monotonic() - request.app.state.started_monotonic_s,
        "max_total_num_tokens": states[0]["max_total_num_tokens"],
        "internal_states": states,
    }


@router.get("/v1/loads")
async def loads(request: Request, include: str | None = None, dp_rank: int | None = None) -> dict[str, Any]:
    """How busy each replica is; for routers and dashboards."""
    _FOREIGN_LOADS.check(dict(request.query_params), ("include", "dp_rank"))
    sections = {section.strip() for section in (include or "all").split(",")}
    for section in sections.difference(_LOAD_SECTIONS):
        raise RequestError(f"include must name sections of {', '.join(_LOAD_SECTIONS)}, got {section!r}.", param="include")
    num_replicas = _args(request).dp_size
    if dp_rank is not None and not 0 <= dp_rank < num_replicas:
        raise RequestError(f"dp_rank must be in [0, {num_replicas}), got {dp_rank}.", param="dp_rank")
    live = service_of(request).num_live_by_rank
    return {
        "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
        "version": package_version(),
        "loads": [
            {**_load(state, sections), "num_live_sequences": live[state["dp_rank"]]}
            for state in await _internal_states(request)
            if dp_rank in (None, state["dp_rank"])
        ],
    }


@router.get("/get_load", deprecated=True)
async def load_of_old(request: Request) -> list[dict[str, int]]:
    """What /v1/loads has for each replica, as SGLang wrote it before it had that; released routers ask for this."""
    return [
        {
            "dp_rank": state["dp_rank"],
            "num_reqs": state["num_running_reqs"] + state["num_waiting_reqs"],
            "num_waiting_reqs": state["num_waiting_reqs"],
            "num_tokens": _total_tokens(state),
        }
        for state in await _internal_states(request)
    ]


def _load(state: dict[str, Any], sections: set[str]) -> dict[str, Any]:
    """Core is always there, as in SGLang."""
    load = {**_renamed(state, _CORE_LOADS), "num_total_tokens": _total_tokens(state)}
    if sections & {"queues", "all"}:
        load["queues"] = _renamed(state, _QUEUES)
    if sections & {"spec", "all"} and state["avg_spec_accept_length"] is not None:
        load["speculative"] = _renamed(state, _SPECULATIVE)
    return load


def _renamed(state: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {name: state[theirs] for name, theirs in names.items()}


def _total_tokens(state: dict[str, Any]) -> int:
    """Those in use, and those of prompts that wait."""
    total: int = state["num_used_tokens"] + state["num_pending_tokens"]
    return total


@router.get("/recent_requests")
async def recent_requests(request: Request, limit: int = Query(100, ge=1, le=_MOST_RECENT)) -> Response:
    """When things happened to the newest requests, live ones among them; nothing of what they asked or got."""
    timelines = sorted(await service_of(request).recent_requests(), key=lambda timeline: timeline.received_s)
    body = msgspec.json.encode({"now_s": time.time(), "requests": timelines[-limit:]})
    return Response(body, media_type="application/json")
