"""What a request's output must match: response_format, and SGLang's json_schema, regex, ebnf and structural_tag.

Makes one Grammar of them. With tools the calls are another way to answer, or the only one. Whether a grammar is any good, the
scheduler finds out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.server.http.body import shown
from jaxserve.server.openai.protocol import OpenAIRequest
from jaxserve.server.requests import RequestError
from jaxserve.types import GRAMMAR_KINDS, Grammar

_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_ANY_OBJECT = '{"type":"object"}'


def requested_grammar(request: OpenAIRequest) -> Grammar | None:
    """Raises RequestError."""
    given: dict[str, Grammar] = {}
    if request.response_format and (grammar := _of_format(request.response_format)) is not None:
        given["response_format"] = grammar
    for kind in GRAMMAR_KINDS:
        value = getattr(request, kind)
        if value not in (None, ""):
            given[kind] = Grammar(kind, value if isinstance(value, str) else _json(value, kind))
    if len(given) > 1:
        names = " and ".join(given)
        raise RequestError(f"{names} cannot be combined: a request may have one grammar.", param=next(iter(given)))
    return next(iter(given.values()), None)


def with_calls(grammar: Grammar | None, calls: dict[str, Any]) -> Grammar:
    """The structural tag of calls, or the grammar: the model may choose."""
    if grammar is not None:
        calls = {"type": "structural_tag", "format": {"type": "or", "elements": [calls["format"], _as_format(grammar)]}}
    return Grammar("structural_tag", _json(calls, "tools"))


def lenient(schema: Any) -> Any:
    """A schema of which the grammar compiler ignores what it does not know, where it would refuse it."""
    if not isinstance(schema, dict):
        return schema
    options = schema.get("x-guidance")
    return {**schema, "x-guidance": {"lenient": True, **(options if isinstance(options, dict) else {})}}


def _of_format(given: dict[str, Any]) -> Grammar | None:
    kind = given.get("type")
    if kind not in _TYPES:
        raise _wrong("response_format.type", f"one of {', '.join(_TYPES)}", kind)
    if kind == "structural_tag":
        return Grammar("structural_tag", _json(given, "response_format"))
    known = {"json_schema": ("type", "json_schema", "schema")}.get(kind, ("type",))
    for name, value in given.items():
        if name not in known and value is not None:
            raise RequestError(f"response_format.{name} is not a field of the type {kind}.", param="response_format")
    if kind == "json_schema":
        return Grammar("json_schema", _json(_schema(given), "response_format"))
    return Grammar("json_schema", _ANY_OBJECT) if kind == "json_object" else None


def _schema(given: dict[str, Any]) -> Any:
    """As OpenAI has it, or right in response_format, which SGLang takes, too."""
    described = given.get("json_schema")
    if described is None and given.get("schema") is not None:
        described = {"schema": given["schema"]}
    if not isinstance(described, dict):
        raise _wrong("response_format.json_schema", "an object with a name and a schema", described)
    for name, kinds, rule in (
        ("name", str | None, "a string"),
        ("description", str | None, "a string"),
        ("strict", bool | None, "true or false"),
    ):
        if not isinstance(described.get(name), kinds):
            raise _wrong(f"response_format.json_schema.{name}", rule, described[name])
    for name in described.keys() - {"name", "description", "strict", "schema"}:
        raise RequestError(f"response_format.json_schema.{name} is not a field this server knows.", param="response_format")
    if not isinstance(described.get("schema"), dict):
        raise _wrong("response_format.json_schema.schema", "a JSON schema", described.get("schema"))
    return described["schema"] if described.get("strict") else lenient(described["schema"])


def _as_format(grammar: Grammar) -> dict[str, Any]:
    """A grammar as a part of a structural tag."""
    if grammar.kind == "regex":
        return {"type": "regex", "pattern": grammar.text}
    if grammar.kind == "ebnf":
        return {"type": "grammar", "grammar": grammar.text}
    try:
        value = msgspec.json.decode(grammar.text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{grammar.kind} is not valid JSON: {error}.", param=grammar.kind) from None
    if grammar.kind == "json_schema":
        return {"type": "json_schema", "json_schema": value}
    format_ = value.get("format", _modern(value)) if isinstance(value, dict) else None
    if not isinstance(format_, dict):
        raise RequestError("structural_tag must have a format, or structures and triggers.", param="structural_tag")
    return format_


def _modern(tag: dict[str, Any]) -> dict[str, Any] | None:
    """SGLang's older form as a format; whether it is a good one is seen there."""
    structures = tag.get("structures")
    if not isinstance(structures, list) or not all(isinstance(one, dict) for one in structures):
        return None
    rest = {name: value for name, value in tag.items() if name not in ("type", "structures")}
    tags = [
        {"type": "tag", "content": {"type": "json_schema", "json_schema": one.get("schema", {})}}
        | {name: value for name, value in one.items() if name != "schema"}
        for one in structures
    ]
    return {"type": "triggered_tags", "tags": tags, **rest}


def _json(value: Any, field: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise RequestError(f"{field} is nested too deeply.", param=field) from None


def _wrong(where: str, rule: str, value: Any) -> RequestError:
    return RequestError(f"{where} must be {rule}, got {shown(value)}.", param="response_format")
