"""OpenAPI descriptions of the bodies that msgspec parses; FastAPI describes the rest by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI

_REF_TEMPLATE = "#/components/schemas/{name}"


def json_body(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """For a route's `openapi_extra`: its body is this struct as JSON. The app must be told of the struct, too."""
    schema = {"$ref": _REF_TEMPLATE.format(name=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def query_parameters(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """For a route's `openapi_extra`: its query parameters are this struct's fields."""
    _, components = msgspec.json.schema_components([kind], ref_template=_REF_TEMPLATE)
    described = components[kind.__name__]
    required = described.get("required", [])
    return {
        "parameters": [
            {"name": name, "in": "query", "required": name in required, "schema": schema}
            for name, schema in described["properties"].items()
        ]
    }


class DocumentedApp(FastAPI):
    """A FastAPI whose /openapi.json also holds the structs its routes parse."""

    def __init__(self, structs: Sequence[type[msgspec.Struct]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._structs = structs

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schema = super().openapi()
            _, components = msgspec.json.schema_components(self._structs, ref_template=_REF_TEMPLATE)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
            self.openapi_schema = schema
        return self.openapi_schema
