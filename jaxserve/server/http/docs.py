"""The API's description: /openapi.json, and /docs, which shows it without a script and without the network.

FastAPI describes routes; what it cannot see is added here: bodies that msgspec parses, what fields mean, keys, and errors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from jaxserve.server.http import replies
from jaxserve.server.http.descriptions import EXAMPLES, FIELDS, FIELDS_OF, LIMITS
from jaxserve.server.http.docs_page import page
from jaxserve.server.http.envelopes import ENVELOPES, envelope_of
from jaxserve.server.requests import ERR_TYPES, RequestError, SessionParams
from jaxserve.types import SamplingParams

_REF_TEMPLATE = "#/components/schemas/{name}"
# Nothing but the page's own style sheet.
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}

_ERRORS = {
    400: "A field is missing, unknown, of the wrong type or out of its limits; the sentence names it.",
    401: "The API key is missing or wrong.",
    403: "The request comes from a web page, or asks for a name, that may not use this server.",
    404: "The model is not the one served.",
    408: "The body came too slowly.",
    413: "The body is larger than --max-body-size-mb.",
    500: "The server failed; its log says more.",
    503: "The server is starting, shutting down or paused, its queue is full, or the request waited or ran too long.",
}
# Routes whose replies may be streams: how these end, and their content type.
_OPENAI_STREAM = ("events that end with `data: [DONE]`", "text/event-stream")
_STREAMS = {
    "/generate": _OPENAI_STREAM,
    "/v1/completions": _OPENAI_STREAM,
    "/v1/chat/completions": _OPENAI_STREAM,
    "/v1/responses": ("events that end with `response.completed`, `incomplete` or `failed`", "text/event-stream"),
    "/v1/messages": ("events that end with `message_stop`", "text/event-stream"),
    "/api/chat": ("lines that end with one that is `done`", "application/x-ndjson"),
    "/api/generate": ("lines that end with one that is `done`", "application/x-ndjson"),
}


def json_body(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """For a route's `openapi_extra`: its body is this struct as JSON. The app must be told of the struct, too."""
    schema = {"$ref": _REF_TEMPLATE.format(name=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def query_parameters(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """For a route's `openapi_extra`: its query parameters are this struct's fields."""
    _, components = msgspec.json.schema_components([kind], ref_template=_REF_TEMPLATE)
    described = components[kind.__name__]
    required = described.get("required", [])
    fields = _with_descriptions(described["properties"], {})
    return {
        "parameters": [
            {"name": name, "in": "query", "required": name in required, "schema": schema} for name, schema in fields.items()
        ]
    }


def generate_body(properties: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    """For the `openapi_extra` of a route that reads its body itself. Its `sampling_params` are added."""
    sampling = {"$ref": _REF_TEMPLATE.format(name=SamplingParams.__name__)}
    either = {"anyOf": [sampling, {"type": "array", "items": sampling}]}
    fields = _with_descriptions({**properties, "sampling_params": either}, {})
    schema = {"type": "object", "properties": fields, "additionalProperties": False, "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _with_descriptions(properties: dict[str, Any], special: Mapping[str, str]) -> dict[str, Any]:
    meanings = {**FIELDS, **special}
    return {name: {**field, "description": meanings[name]} if name in meanings else field for name, field in properties.items()}


class DocumentedApp(FastAPI):
    """A FastAPI whose /openapi.json also holds the structs its routes parse, and whose /docs needs nothing from elsewhere."""

    def __init__(self, structs: Sequence[type[msgspec.Struct]], *, open_prefixes: Collection[str], **kwargs: Any) -> None:
        """`open_prefixes`: of paths that need no key."""
        super().__init__(docs_url=None, redoc_url=None, **kwargs)
        self._structs = structs
        self._open_prefixes = tuple(open_prefixes)
        self._page = ""  # made when it is first asked for
        self.add_api_route("/docs", self._docs, include_in_schema=False)

    async def _docs(self) -> HTMLResponse:
        self._page = self._page or page(self.openapi())
        return HTMLResponse(self._page, headers=_PAGE_HEADERS)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schema = super().openapi()
            components = schema.setdefault("components", {})
            components["schemas"] = _schemas(self._structs)
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path, operations in schema["paths"].items():
                for method, operation in operations.items():
                    _complete(operation, path, method, needs_key=not path.startswith(self._open_prefixes))
            self.openapi_schema = schema
        return self.openapi_schema


def _schemas(structs: Sequence[type[msgspec.Struct]]) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components([*structs, SamplingParams, SessionParams], ref_template=_REF_TEMPLATE)
    for struct, described in schemas.items():
        described["description"] = " ".join(described.get("description", "").split())
        fields, limits = described.get("properties", {}), LIMITS.get(struct, {})
        fields = {name: _limited(field, limits.get(name, {})) for name, field in fields.items()}
        described["properties"] = _with_descriptions(fields, FIELDS_OF.get(struct, {}))
        if struct in EXAMPLES:
            described["example"] = EXAMPLES[struct]
    schemas[SamplingParams.__name__]["description"] = "How to draw tokens and when to stop."
    for envelope in ENVELOPES:
        example = envelope.body(RequestError("One sentence.", param="temperature"))
        schemas[envelope.name] = {"type": "object", "example": example, "description": envelope.description}
    return dict(schemas)


def _limited(field: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in limits:
        field = {key: value for key, value in field.items() if key not in ("type", "items", "anyOf")}
    return {**field, **limits}


def _complete(operation: dict[str, Any], path: str, method: str, *, needs_key: bool) -> None:
    """Adds the key and the errors to one operation."""
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own; here that is 400
    if path.startswith(("/health", "/ready")):
        for code, meaning in (("200", "Yes."), ("503", "Not now; the text says why.")):
            responses[code] = {"description": meaning, "content": replies.described(path, method)}
        return
    if needs_key:
        operation["security"] = [{"key": []}]
    reference = {"$ref": _REF_TEMPLATE.format(name=envelope_of(path).name)}
    for status in sorted(_error_statuses(operation, path)):
        description = f"{ERR_TYPES[status]}: {_ERRORS[status]}"
        responses[str(status)] = {"description": description, "content": {"application/json": {"schema": reference}}}
    responses["200"] = {"description": "The reply.", "content": replies.described(path, method)}
    if path in _STREAMS:
        parts, media_type = _STREAMS[path]
        responses["200"]["description"] = f"The reply; with `stream: true` {parts}."
        responses["200"]["content"][media_type] = {"schema": {"type": "string"}}


def _error_statuses(operation: dict[str, Any], path: str) -> set[int]:
    statuses = {403, 500, 503}
    has_body = "requestBody" in operation
    if "security" in operation:
        statuses.add(401)
    if has_body or "parameters" in operation:
        statuses.add(400)
    if has_body:
        statuses |= {408, 413}
    if "{" in path or (has_body and (path.startswith(("/v1/", "/api/")) or path in ("/tokenize", "/detokenize"))):
        statuses.add(404)
    return statuses
