"""Reading and checking request bodies: bytes in, a typed struct out, or a RequestError that names the field and its value.

Bodies are parsed with msgspec (a tenth of the time pydantic takes). Its messages speak of JSON paths and types; here they
become sentences about fields.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from jaxserve.server.foreign_fields import ForeignFields, unknown_field
from jaxserve.server.requests import RequestError

T = TypeVar("T")

_TYPE_WORDS = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "a list",
    "object": "an object",
}  # fmt: skip

_MAX_SHOWN_CHARS = 80
_AT_PATH = re.compile(r"^(?P<problem>.*?) - at `(?P<path>.*)`$", re.DOTALL)
_WRONG_TYPE = re.compile(r"^Expected `(?P<expected>[^`]+)`(?P<bound> [<>]=? -?[\d.]+)?(?:, got `[^`]+`)?$")
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")
_UNKNOWN = re.compile(r"contains unknown field `(?P<field>[^`]*)`")


NO_FOREIGN_FIELDS = ForeignFields()


async def read_bytes(request: Request) -> bytes:
    """The body. Not `request.body()`, which the request would keep as long as its reply streams."""
    return b"".join([chunk async for chunk in request.stream()])


async def read_json_bytes(request: Request) -> bytes:
    """The body of a request that must have one (that it says to be JSON was checked, see `content_type`)."""
    raw = await read_bytes(request)
    if not raw.strip():
        raise RequestError("The request body is empty; a JSON object is expected.")
    return raw


async def read_json_object(request: Request) -> dict[str, Any]:
    return decode_json_object(await read_json_bytes(request))


def decode_json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except _MALFORMED as error:
        raise _malformed(error) from None
    if not isinstance(body, dict):
        raise RequestError(f"The request body must be a JSON object, got {shown(body)}.")
    return body


async def read_struct(request: Request, decoder: msgspec.json.Decoder[T], foreign: ForeignFields = NO_FOREIGN_FIELDS) -> T:
    return decode_struct(await read_json_bytes(request), decoder, foreign)


def decode_struct(raw: bytes, decoder: msgspec.json.Decoder[T], foreign: ForeignFields = NO_FOREIGN_FIELDS) -> T:
    """The body as the decoder's struct. Where that forbids unknown fields, `foreign` are those to be treated otherwise."""
    try:  # explaining an error reads the body again, to its end
        try:
            return decoder.decode(raw)
        except msgspec.ValidationError as error:
            if _UNKNOWN.search(str(error)):
                without: T = _without_foreign_fields(raw, decoder.type, foreign)
                return without
            raise _field_error(str(error), raw) from None
    except _MALFORMED as error:
        raise _malformed(error) from None


def _without_foreign_fields(raw: bytes, kind: Any, foreign: ForeignFields) -> Any:
    fields, served = msgspec.json.decode(raw), kind.__struct_encode_fields__
    foreign.check(fields, served)
    try:
        return msgspec.convert({name: value for name, value in fields.items() if name in served}, kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), raw) from None


def shown(value: Any) -> str:
    """A value for an error message, cut to a readable length."""
    try:
        text = json.dumps(value, ensure_ascii=False)  # not msgspec: integers may be of any size here
    except RecursionError:
        return "a value that is nested too deeply"
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."


def _malformed(error: Exception) -> RequestError:
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    reason = reason.removeprefix("JSON is malformed: ").partition(" - at ")[0]  # a path without names, such as $[...]
    return RequestError(f"The request body is not valid JSON: {reason}.")


def _field_error(message: str, raw: bytes) -> RequestError:
    at = _AT_PATH.match(message)
    problem, path = (at["problem"], at["path"]) if at else (message, "$")
    missing = _MISSING.search(problem)
    # msgspec writes a dict's key as `key` in `$.field`; the field is what helps.
    path = path.rpartition("`")[2].removeprefix("$").removeprefix(".")
    if missing:
        field = f"{path}.{missing['field']}" if path else missing["field"]
        return RequestError(f"{field} is required.", param=field)
    if unknown := _UNKNOWN.search(problem):
        return unknown_field(f"{path}.{unknown['field']}" if path else unknown["field"])
    wrong_type = _WRONG_TYPE.match(problem)
    if wrong_type:
        kinds = [_TYPE_WORDS.get(kind, kind) for kind in wrong_type["expected"].split(" | ")]
        rule = f"must be {' or '.join(kinds)}{wrong_type['bound'] or ''}"
    else:
        rule = f"is wrong: {problem}"
    if not path:
        return RequestError(f"The request body {rule}, got {shown(msgspec.json.decode(raw))}.")
    field = path.partition("[")[0]
    return RequestError(f"{path.replace('[...]', '[]')} {rule}, got {shown(_value_at(raw, field))}.", param=field)


def _value_at(raw: bytes, field: str) -> Any:
    value = msgspec.json.decode(raw)
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
