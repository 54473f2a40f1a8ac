"""Parameters between tags, which some models write in place of a JSON object, as formats of plainer kinds.

    <parameter=city>Oslo</parameter>
    <parameter=days>3</parameter>

Each property of the schema is a tag, in the schema's order, and those not required may be left out. A string stands as it is;
every other value is JSON. White space may stand between tags, and around what is JSON.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.grammar.errors import GrammarError
from jaxserve.grammar.tag_formats import AnyFormat, AnyText, ConstString, JsonSchema, Optional, Or, Regex, Sequence, Star, Tag

_SPACE = Optional(content=Regex(pattern=r"[ \n\t]{1,32}"))
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_DEFINITIONS = ("$defs", "definitions")
_MOST_REFERENCES = 32  # of one another


@dataclasses.dataclass(frozen=True)
class _Style:
    before_name: str
    before_value: str
    end: str


_STYLES = {
    "qwen_xml": _Style("<parameter=", ">", "</parameter>"),
    "minimax_xml": _Style('<parameter name="', '">', "</parameter>"),
    "glm_xml": _Style("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
}


def parameters(schema: bool | dict[str, Any], style_name: str, place: str) -> AnyFormat:
    """`place` is the schema's, for errors. Raises GrammarError."""
    style = _STYLES[style_name]
    whole: dict[str, Any] = schema if isinstance(schema, dict) else {"type": "object", "additionalProperties": schema}
    definitions = {name: whole[name] for name in _DEFINITIONS if name in whole}
    whole = _resolved(whole, definitions, place)
    properties, required = whole.get("properties", {}), whole.get("required", [])
    if whole.get("type", "object") != "object" or not isinstance(properties, dict) or not isinstance(required, list):
        raise GrammarError(f"structural_tag: {place} must describe an object for style {style_name}.")
    elements: list[AnyFormat] = [_SPACE]
    for name, value in properties.items():
        content = _value(value, definitions, f"{place}.properties.{name}")
        tag = Tag(begin=f"{style.before_name}{name}{style.before_value}", content=content, end=style.end)
        parameter = Sequence(elements=(tag, _SPACE))
        elements.append(parameter if name in required else Optional(content=parameter))
    others = whole.get("additionalProperties", False)
    if others is not False:
        begin = Sequence(elements=(ConstString(value=style.before_name), Regex(pattern=_NAME)))
        tag = Tag(begin=style.before_value, content=_value(others, definitions, place), end=style.end)
        elements.append(Star(content=Sequence(elements=(begin, tag, _SPACE))))
    return Sequence(elements=tuple(elements))


def _value(schema: Any, definitions: dict[str, Any], place: str) -> AnyFormat:
    schema = _resolved(schema, definitions, place)
    if schema is True or schema == {}:
        return AnyText()
    if not isinstance(schema, dict):
        raise GrammarError(f"structural_tag: {place} must be a schema that something can match.")
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return _any_of([_exactly(value) for value in values])
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return _any_of([_value(one, definitions, f"{place}.{keyword}") for one in schema[keyword]])
    kind = schema.get("type")
    if isinstance(kind, list):
        return _any_of([_value({**schema, "type": one}, definitions, place) for one in kind])
    if kind == "string":
        return _string(schema)
    if kind is None:
        return AnyText()
    return _json({**schema, **definitions})


def _any_of(formats: list[AnyFormat]) -> AnyFormat:
    """Free text takes in all that the others would."""
    return AnyText() if AnyText() in formats else Or(elements=tuple(formats))


def _string(schema: dict[str, Any]) -> AnyFormat:
    if "pattern" in schema:
        return Regex(pattern=_searched(schema["pattern"]))
    if "minLength" in schema or "maxLength" in schema:
        return Regex(pattern=f"(?s:.){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}")
    return AnyText()


def _searched(pattern: str) -> str:
    """A schema's pattern may be found anywhere, unless it says where."""
    head = "" if pattern.startswith("^") else "(?s:.*)"
    is_anchored = pattern.endswith("$") and not pattern.endswith("\\$")
    tail = "" if is_anchored else "(?s:.*)"
    return f"{head}({pattern.removeprefix('^')[: -1 if is_anchored else None]}){tail}"


def _exactly(value: Any) -> AnyFormat:
    return ConstString(value=value) if isinstance(value, str) else _json({"const": value})


def _json(schema: dict[str, Any]) -> AnyFormat:
    return Sequence(elements=(_SPACE, JsonSchema(json_schema=schema), _SPACE))


def _resolved(schema: Any, definitions: dict[str, Any], place: str) -> Any:
    """Without a reference at its top. Only those into the schema's definitions are followed."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if reference is None:
            return schema
        _, _, inside = str(reference).partition("#/")
        kind, _, name = inside.partition("/")
        if name not in definitions.get(kind, {}):
            raise GrammarError(f"structural_tag: {place}: {reference} is not one of the schema's definitions.")
        schema = definitions[kind][name]
    raise GrammarError(f"structural_tag: {place}: its references go in a circle.")
