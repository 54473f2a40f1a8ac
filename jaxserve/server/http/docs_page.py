"""The page at /docs: an OpenAPI schema as HTML. No script, no style sheet or font from elsewhere, so it works without the
network, behind any proxy, and in a terminal's browser.

It knows the part of JSON schema that this server's description uses, and nothing of the routes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font-family: ui-monospace, monospace; font-size: 13px }
pre { overflow-x: auto; padding: .6rem; border: 1px solid #8886; border-radius: 4px }
h3 { margin: 2rem 0 .3rem; border-top: 1px solid #8886; padding-top: 1rem }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #8883 }
summary { cursor: pointer }
"""
# Limits this large only say that a number has 32 or 64 bits.
_LEAST_TOLD_LIMIT = 2**31 - 1


def page(schema: dict[str, Any]) -> str:
    """The whole page for an OpenAPI schema."""
    info, schemas = schema["info"], schema["components"]["schemas"]
    operations = [
        (path, method, operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
        if not operation.get("deprecated")
    ]
    tags = list(dict.fromkeys(operation["tags"][0] for _, _, operation in operations))
    parts = [
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{escape(info['title'])}</title>",
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])} ",
        "<a href=openapi.json>openapi.json</a> describes the same for programs. ",
        "With <code>--api-key</code>, requests bring the header <code>Authorization: Bearer KEY</code>.</p>",
    ]
    for tag in tags:
        of_tag = [(path, method, operation) for path, method, operation in operations if operation["tags"][0] == tag]
        links = " · ".join(f"<a href='#{_anchor(method, path)}'>{escape(path)}</a>" for path, method, _ in of_tag)
        parts.append(f"<p><b>{escape(tag)}</b> {links}</p>")
    for path, method, operation in operations:
        parts += _operation(path, method, operation, schemas)
    parts.append("<h2>Objects</h2>")
    bodies = {_reference(_body(operation)) for _, _, operation in operations}
    for name in (name for name in schemas if name not in bodies):
        parts += _object(name, schemas[name])
    return "\n".join([*parts, "</body></html>"])


def _body(operation: dict[str, Any]) -> dict[str, Any]:
    """The schema of an operation's body; empty if it has none."""
    schema: dict[str, Any] = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    return schema


def _reference(schema: dict[str, Any]) -> str:
    """The name of the object a schema refers to, or nothing."""
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _anchor(method: str, path: str) -> str:
    return escape(f"{method}{path}", quote=True)


def _operation(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    title = f"<code>{method.upper()} {escape(path)}</code>"
    yield f"<h3 id='{_anchor(method, path)}'>{title}</h3>"
    yield f"<p>{_text(operation.get('description', ''))}</p>"
    if parameters := operation.get("parameters"):
        yield from _fields({one["name"]: {**one["schema"], "in": one["in"]} for one in parameters}, ())
    if body := _body(operation):
        whole = schemas.get(_reference(body), body)
        yield from _fields(whole.get("properties", {}), whole.get("required", ()))
        yield _curl(path, whole, "security" in operation)
    replies = "".join(
        f"<tr><td><code>{status}</code><td>{_text(reply['description'])} {_reply_kind(reply)}</tr>"
        for status, reply in operation["responses"].items()
    )
    yield f"<details><summary>Replies</summary><table>{replies}</table></details>"


def _object(name: str, described: dict[str, Any]) -> Iterator[str]:
    yield f"<h3 id='{escape(name)}'><code>{escape(name)}</code></h3><p>{_text(described.get('description', ''))}</p>"
    if "example" in described:
        yield f"<pre>{escape(json.dumps(described['example'], indent=2))}</pre>"
    yield from _fields(described.get("properties", {}), described.get("required", ()))


def _fields(fields: dict[str, Any], required: Any) -> Iterator[str]:
    if not fields:
        return
    yield "<table><tr><th>field<th>type<th>default<th></tr>"
    for name, schema in fields.items():
        default = "required" if name in required else _default(schema)
        limits = f" <code>{escape(told)}</code>" if (told := _limits(schema)) else ""
        yield (
            f"<tr><td><code>{escape(name)}</code><td>{_type(schema)}{limits}<td>{default}"
            f"<td>{_text(schema.get('description', ''))}</tr>"
        )
    yield "</table>"


def _default(schema: dict[str, Any]) -> str:
    return "" if schema.get("default") is None else f"<code>{escape(json.dumps(schema['default']))}</code>"


def _type(schema: dict[str, Any]) -> str:
    if name := escape(_reference(schema)):
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema:  # null is what every field that may be left out takes
        return " or ".join(_type(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    kind = escape(str(schema.get("type", "anything")))
    if kind == "array" and schema.get("items"):
        items = _type(schema["items"])
        return f"list of ({items})" if "anyOf" in schema["items"] else f"list of {items}"
    return kind


def _limits(schema: dict[str, Any]) -> str:
    """Such as "> 0, ≤ 1, ≤ 32 entries"."""
    signs = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}",
             "maxLength": "≤ {} characters", "maxItems": "≤ {} entries", "maxProperties": "≤ {} entries"}  # fmt: skip
    return ", ".join(
        sign.format(f"{schema[key]:g}") for key, sign in signs.items() if key in schema and abs(schema[key]) < _LEAST_TOLD_LIMIT
    )


def _reply_kind(reply: dict[str, Any]) -> str:
    schema = reply.get("content", {}).get("application/json", {}).get("schema", {})
    return f"({_type(schema)})" if "$ref" in schema else ""


def _curl(path: str, body: dict[str, Any], needs_key: bool) -> str:
    key = ' -H "Authorization: Bearer $KEY"' if needs_key else ""
    line = f"curl $URL{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body.get('example', {}))}'"
    return f"<pre>{escape(line)}</pre>"


def _text(text: str) -> str:
    """Escaped, with `code` between back quotes."""
    parts = escape(" ".join(text.split())).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
