"""Whether the `parameters` of a tool are a JSON schema, and the type names of databases and languages made JSON's.

Models and clients of SGLang bring schemas with types such as varchar or int32; they mean what SGLang takes them for. Knows no
request: what is wrong is a ValueError whose text follows the place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jaxserve.server.http.body import shown

_TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
_ALIASES = {
    alias: name
    for name, aliases in {
        "string": "str text varchar char enum uuid date datetime time timestamp binary blob bytea bytes varbinary",
        "boolean": "bool",
        "integer": "bigint smallint tinyint",
        "number": "double decimal real numeric",
        "array": "arr tuple set",
        "object": "map",
    }.items()
    for alias in aliases.split()
}
_FAMILIES = re.compile(
    r"(?:(?P<integer>u?int|long|short|unsigned)|(?P<number>num|float)|(?P<array>list)|(?P<object>dict))(?:[\d\[<(\s].*)?",
    re.DOTALL,
)

# Keywords by what they hold.
_SCHEMA = (
    "items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_STRINGS = ("title", "description", "pattern", "format", "$ref", "$id", "$schema", "$comment")


def check_schema(schema: dict[str, Any], where: str) -> None:
    """Raises ValueError with a sentence. Types that go by other names are renamed in place."""
    todo: list[tuple[str, Any]] = [(where, schema)]
    while todo:
        place, part = todo.pop()
        if isinstance(part, bool) and place != where:
            continue
        if not isinstance(part, dict):
            raise _wrong(place, "a JSON schema", part)
        if "type" in part:
            part["type"] = _standard_types(part["type"], f"{place}.type")
        for keyword, (rule, is_right) in _RULES.items():
            if keyword in part and not is_right(part[keyword]):
                raise _wrong(f"{place}.{keyword}", rule, part[keyword])
        todo += _parts(part, place)


def _parts(schema: dict[str, Any], place: str) -> list[tuple[str, Any]]:
    """The schemas within a schema whose keywords hold what they must."""
    parts = [(f"{place}.{keyword}", schema[keyword]) for keyword in _SCHEMA if keyword in schema]
    for keyword in _SCHEMAS_BY_NAME:
        parts += [(f"{place}.{keyword}.{name}", part) for name, part in schema.get(keyword, {}).items()]
    for keyword in _SCHEMA_LISTS:
        parts += [(f"{place}.{keyword}[{i}]", part) for i, part in enumerate(schema.get(keyword, []))]
    return parts


def _standard_types(value: Any, place: str) -> Any:
    names = value if isinstance(value, list) else [value]
    known = [_standard_type(name) if isinstance(name, str) else name for name in names]
    for name in known:
        if name not in _TYPES:
            raise _wrong(place, f"one of {', '.join(_TYPES)}, or a list of those", value)
    if not known:
        raise _wrong(place, "a type or a list of types", value)
    return list(dict.fromkeys(known)) if isinstance(value, list) else known[0]


def _standard_type(name: str) -> str:
    if name in _TYPES:
        return name
    base = name.partition("(")[0].strip().lower()  # varchar(255)
    if base in _TYPES:
        return base
    family = _FAMILIES.fullmatch(base)
    return _ALIASES.get(base) or (family.lastgroup if family else None) or name


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_SCHEMAS_BY_NAME, ("an object of JSON schemas", lambda value: isinstance(value, dict))),
    **dict.fromkeys(_SCHEMA_LISTS, ("a list of JSON schemas", lambda value: isinstance(value, list) and bool(value))),
    **dict.fromkeys(
        _COUNTS, ("a number from 0", lambda value: _is_number(value) and value >= 0 and value == int(value))
    ),
    **dict.fromkeys(_NUMBERS, ("a number", _is_number)),
    **dict.fromkeys(_STRINGS, ("a string", lambda value: isinstance(value, str))),
    "uniqueItems": ("true or false", lambda value: isinstance(value, bool)),
    "enum": ("a list", lambda value: isinstance(value, list)),
    "required": ("a list of names", lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value)),
}  # fmt: skip


def _wrong(place: str, rule: str, value: Any) -> ValueError:
    return ValueError(f"{place} must be {rule}, got {shown(value)}.")
