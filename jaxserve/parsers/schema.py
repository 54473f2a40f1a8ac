"""Arguments that come as bare text: what JSON they are follows from the tool's schema."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.parsers.values import as_json

TEXT = frozenset({"string"})
_NULLS = ("null", "none")
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_VALUE_KINDS = {
    str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", list: "array", dict: "object",
}  # fmt: skip


def properties(schema: Any) -> dict[str, Any]:
    """Schemas of the arguments."""
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def kinds(schema: Any, argument: str) -> frozenset[str]:
    """JSON types that an argument may have by the schema of all arguments; text, if it says nothing of it."""
    found: set[str] = set()
    nodes = [properties(schema).get(argument)]
    seen: set[int] = set()
    while nodes:
        node = nodes.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        named = node.get("type")
        found.update(kind for kind in _list(named) or [named] if isinstance(kind, str))
        if named is None:
            values = [node["const"]] if "const" in node else _list(node.get("enum"))
            found.update(_VALUE_KINDS[type(value)] for value in values)
        for word in ("anyOf", "oneOf", "allOf"):
            nodes += _list(node.get(word))
        if isinstance(reference := node.get("$ref"), str):
            nodes.append(_resolved(reference, schema))
    return frozenset(found) or TEXT


def choices(schema: Any) -> list[str]:
    """The texts that an argument is one of; empty: any."""
    values = _list(schema.get("enum")) if isinstance(schema, dict) else []
    return values if all(isinstance(value, str) for value in values) else []


def typed(text: str, kinds: frozenset[str]) -> str:
    """The argument as JSON: of one of these types if it can be read so, else a string."""
    word = text.strip()
    if word.lower() in _NULLS and ("null" in kinds or "string" not in kinds):
        return "null"
    if word.lower() in ("true", "false") and "boolean" in kinds:
        return word.lower()
    if kinds != TEXT and (value := as_json(word)) is not None:
        kind = _kind(value)
        if kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds)):
            return value
    return json.dumps(text, ensure_ascii=False)


def _kind(value: str) -> str:
    number = "number" if set(value) & set(".eE") else "integer"
    return _KINDS.get(value[0], number)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolved(reference: str, schema: Any) -> Any:
    node = schema
    for step in reference.removeprefix("#/").split("/"):
        node = node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node
