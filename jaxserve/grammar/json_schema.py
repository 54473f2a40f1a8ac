"""What is done to a JSON schema before the library sees it.

Formats that the library does not know are annotations, as the standard has it.
"""

from __future__ import annotations

from typing import Any

KNOWN_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
# Keywords whose values are data, not schemas.
_DATA = frozenset(("const", "enum", "default", "examples"))
# Keywords whose values hold schemas by names of the user's own.
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


def without_unknown_formats(schema: Any) -> Any:
    """RecursionError if it is nested too deeply."""
    if isinstance(schema, list):
        return [without_unknown_formats(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _value(name, value) for name, value in schema.items() if not _is_unknown_format(name, value)}


def _value(keyword: str, value: Any) -> Any:
    if keyword in _DATA:
        return value
    if keyword in _BY_NAME and isinstance(value, dict):
        return {name: without_unknown_formats(one) for name, one in value.items()}
    return without_unknown_formats(value)


def _is_unknown_format(keyword: str, value: Any) -> bool:
    return keyword == "format" and isinstance(value, str) and value not in KNOWN_FORMATS
