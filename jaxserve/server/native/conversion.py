"""Values of a request as the types that they must be, or a sentence about the field that is not."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from jaxserve.server.requests import RequestError

_TYPE_WORDS = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "a list",
    "object": "an object", "null": "null",
}  # fmt: skip


def convert(value: Any, kind: Any, name: str) -> Any:
    """`name`: of the field. Raises RequestError."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise sentence(str(error), name) from None


def sentence(problem: str, name: str) -> RequestError:
    """msgspec's message as a sentence with the field's full name."""
    unknown = re.search(r"unknown field `([^`]*)`", problem)
    if unknown:
        field = unknown.group(1)
        return RequestError(f"{name} has no field {field!r}.", param=field)
    place = re.search(r"at `(?:(key)` in `)?\$([^`]*)`", problem)
    where = (place.group(2) if place else "").replace("[...]", "")
    field = where.lstrip(".").split("[")[0] if name == "sampling_params" and where else name.partition("[")[0]
    types = re.search(r"Expected `([^`]*)`, got `([^`]*)`", problem)
    if not types:
        return RequestError(f"{name}{where}: {problem}.", param=field)
    wanted = " or ".join(_TYPE_WORDS.get(kind.strip(), kind.strip()) for kind in types.group(1).split("|"))
    got = "a boolean" if types.group(2) == "bool" else _TYPE_WORDS.get(types.group(2), types.group(2))
    part = "" if not place else " keys" if place.group(1) else " values" if "[...]" in place.group(2) else ""
    return RequestError(f"{name}{where}{part} must be {wanted}, got {got}.", param=field)
