"""JSON schemas as applications send them: arguments of functions, extracted records, pydantic's output, configuration."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "maxLength": 12}
INT: Schema = {"type": "integer"}
SMALL: Schema = {"type": "integer", "minimum": 0, "maximum": 99}
BOOL: Schema = {"type": "boolean"}


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> Schema:
    wanted = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": wanted, "additionalProperties": False, **more}


def array(items: Any, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def pattern(regex: str) -> Schema:
    return {"type": "string", "pattern": regex}


def text_format(name: str) -> Schema:
    return {"type": "string", "format": name}


SCHEMAS: dict[str, Schema] = {
    "weather function": closed(
        {"location": {**TEXT, "description": "City and state"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
        ["location"],
    ),
    "search function": closed(
        {
            "query": TEXT,
            "filters": closed({"since": text_format("date"), "tags": array(TEXT, maxItems=3)}, []),
            "limit": {"type": "integer", "minimum": 1, "maximum": 50, "default": 10},
        },
        ["query"],
    ),
    "e-mail function": closed(
        {"to": array(text_format("email"), minItems=1, maxItems=2), "subject": TEXT, "urgent": {**BOOL, "default": False}}
    ),
    "strict mode with nullable fields": closed({"name": TEXT, "nick": {"type": ["string", "null"], "maxLength": 5}}),
    "pydantic model": {
        "$defs": {
            "Color": {"enum": ["red", "green"], "title": "Color", "type": "string"},
            "Item": {
                "title": "Item",
                "type": "object",
                "properties": {"name": {"title": "Name", **TEXT}, "color": {**ref("Color"), "default": "red"}},
                "required": ["name"],
                "additionalProperties": False,
            },
        },
        "title": "Cart",
        "type": "object",
        "properties": {"items": {**array(ref("Item"), maxItems=3), "title": "Items"}, "total": {"type": "number"}},
        "required": ["items"],
        "additionalProperties": False,
    },
    "pydantic optional": closed({"age": {"anyOf": [INT, {"type": "null"}], "default": None}, "id": text_format("uuid")}),
    "pydantic discriminated union": {
        "$defs": {
            "Cat": closed({"kind": {"const": "cat", "type": "string"}, "lives": SMALL}),
            "Dog": closed({"kind": {"const": "dog", "type": "string"}, "good": BOOL}),
        },
        "oneOf": [ref("Cat"), ref("Dog")],
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
    },
    "tuple": {"type": "array", "prefixItems": [INT, TEXT, BOOL], "minItems": 3, "maxItems": 3},
    "matrix": array(array({"type": "number", "minimum": -1, "maximum": 1}, minItems=2, maxItems=2), minItems=2, maxItems=2),
    "expression tree": {
        **ref("expr"),
        "$defs": {
            "expr": {"anyOf": [SMALL, closed({"op": {"enum": ["+", "-"]}, "left": ref("expr"), "right": ref("expr")})]},
        },
    },
    "comment thread": {
        **ref("comment"),
        "$defs": {"comment": closed({"by": TEXT, "replies": array(ref("comment"), maxItems=2)})},
    },
    "self reference": {
        "type": "object",
        "properties": {"v": SMALL, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["v", "next"],
        "additionalProperties": False,
    },
    "older definitions": {**closed({"a": {"$ref": "#/definitions/n"}}), "definitions": {"n": SMALL}},
    "order": closed(
        {
            "id": pattern("^ORD-[0-9]{6}$"),
            "placed": text_format("date-time"),
            "lines": array(
                closed({"sku": pattern("^[A-Z]{3}[0-9]{2}$"), "count": {**SMALL, "minimum": 1}}), minItems=1, maxItems=3
            ),
            "currency": {"enum": ["EUR", "USD", "JPY"]},
        }
    ),
    "invoice amounts": closed({"net": {"type": "number", "minimum": 0, "multipleOf": 0.01}, "rate": {"enum": [0, 7, 19]}}),
    "address": closed(
        {"street": TEXT, "zip": pattern("^[0-9]{5}(-[0-9]{4})?$"), "country": pattern("^[A-Z]{2}$"), "note": TEXT},
        ["street", "country"],
    ),
    "contact formats": closed(
        {"mail": text_format("email"), "web": text_format("uri"), "host": text_format("hostname"), "ip": text_format("ipv4")},
        ["mail", "ip"],
    ),
    "times": closed({"at": text_format("time"), "day": text_format("date"), "lasts": text_format("duration")}),
    "formats nobody checks": closed({"file": text_format("binary"), "secret": {**TEXT, "format": "password"}}, ["secret"]),
    "map of numbers": {"type": "object", "additionalProperties": {"type": "number"}, "maxProperties": 3},
    "map with patterns": {
        "type": "object",
        "patternProperties": {"^s_[a-z]{1,4}$": TEXT, "^n_[a-z]{1,4}$": INT},
        "additionalProperties": False,
    },
    "open object": {"type": "object", "properties": {"id": INT}, "required": ["id"]},
    "large enum": closed({"code": {"enum": [f"code-{i:04d}" for i in range(2000)]}}),
    "large enum of numbers": closed({"year": {"enum": list(range(1900, 2101))}}),
    "chain of thought": closed(
        {"steps": array(closed({"thought": TEXT, "sure": BOOL}), minItems=1, maxItems=3), "answer": INT}
    ),
    "classification": closed(
        {"label": {"enum": ["positive", "negative", "neutral"]}, "score": {"type": "number", "minimum": 0, "maximum": 1}}
    ),
    "entities": closed(
        {
            "entities": array(
                closed({"text": TEXT, "type": {"enum": ["PER", "ORG"]}, "span": array(SMALL, minItems=2, maxItems=2)})
            )
        }
    ),
    "tool choice": {
        "anyOf": [
            closed({"name": {"const": "add"}, "arguments": closed({"a": INT, "b": INT})}),
            closed({"name": {"const": "say"}, "arguments": closed({"words": array(TEXT, maxItems=2)})}),
        ]
    },
    "names in unicode": closed({"имя": TEXT, "都市": {"enum": ["東京", "大阪"]}, "emoji🎉": pattern("^[à-ü]{1,3}$")}),
    "escaped names": closed({'quo"te': {"enum": ['a"b', "back\\slash", "new\nline", "tab\t"]}, "dollar$": BOOL}),
    "deep": closed({"a": closed({"b": closed({"c": closed({"d": closed({"e": array(array(BOOL), maxItems=2)})})})})}),
    "all of with bounds": {
        "allOf": [
            {"type": "object", "properties": {"n": {"type": "integer", "minimum": 5}}, "required": ["n"]},
            closed({"n": {"maximum": 20}, "s": TEXT}, ["n"]),
        ]
    },
    "exclusive bounds": closed({"t": {"type": "number", "exclusiveMinimum": -273.15, "exclusiveMaximum": 100}, "p": SMALL}),
    "bounded strings": closed(
        {"user": {"type": "string", "minLength": 3, "maxLength": 8, "pattern": "^[a-z_]+$"}, "bio": TEXT}
    ),
}
