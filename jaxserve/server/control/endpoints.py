"""The HTTP routes of control requests, derived from their declarations."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from jaxserve.scheduler.control.declaration import Control, ControlStruct, Route, first_failure
from jaxserve.scheduler.control.registry import controls
from jaxserve.server.http.body import decode_struct, read_bytes
from jaxserve.server.http.docs import json_body, query_parameters
from jaxserve.server.http.service import service_of


def control_routers() -> tuple[APIRouter, APIRouter]:
    """The one that the admin key protects, and the others."""
    admin, others = APIRouter(tags=["control"]), APIRouter(tags=["control"])
    for control in controls().values():
        if control.route is not None:
            _add_route(admin if control.route.needs_admin_key else others, control, control.route)
    return admin, others


def documented_bodies() -> tuple[type[msgspec.Struct], ...]:
    """The structs that /docs must be told of."""
    return tuple(c.request for c in controls().values() if c.route is not None and c.route.fields_from == "body")


def _add_route(router: APIRouter, control: Control, route: Route) -> None:
    docs = json_body(control.request) if route.fields_from == "body" else query_parameters(control.request)
    for method in route.methods:
        router.add_api_route(
            route.path,
            _endpoint(control, route),
            methods=[method],
            response_class=Response,
            name=control.name,
            description=control.request.__doc__,
            openapi_extra=docs,
            include_in_schema=method == route.methods[0],
        )


def _endpoint(control: Control, route: Route) -> Callable[[Request], Awaitable[Response]]:
    # A query's values are strings: they may be read as numbers.
    decoder: msgspec.json.Decoder[ControlStruct]
    decoder = msgspec.json.Decoder(control.request, strict=route.fields_from == "body")

    async def endpoint(request: Request) -> Response:
        if route.fields_from == "query":
            raw = json.dumps(dict(request.query_params)).encode()
        else:
            raw = await read_bytes(request)
        replies = await service_of(request).control(decode_struct(raw if raw.strip() else b"{}", decoder))
        return _response(route, replies)

    return endpoint


def _response(route: Route, replies: list[Any]) -> Response:
    status_code = 200 if getattr(first_failure(replies), "success", True) else 400
    shown = route.render(replies)
    if isinstance(shown, str):
        return PlainTextResponse(shown, status_code=status_code)
    return Response(msgspec.json.encode(shown), status_code=status_code, media_type="application/json")
