"""Structural tags as requests bring them: JSON to formats, the pieces that an output is made of.

    {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}}
    {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}

The first is xgrammar's form, the second the one that SGLang had before; it becomes a format, too. What the formats mean for
an output is `tag_lark`'s business. A mistake is a GrammarError that names the field and where it stands.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from jaxserve.grammar.errors import GrammarError
from jaxserve.grammar.json_text import read_json


class Format(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """A piece of the output. Fields that are empty or false by default are those that may be left out."""


class ConstString(Format, frozen=True, tag="const_string"):
    value: str


class JsonSchema(Format, frozen=True, tag="json_schema"):
    json_schema: bool | dict[str, Any]
    style: Literal["json", "qwen_xml", "minimax_xml", "glm_xml"] = "json"  # the others: parameters between tags


class QwenXmlParameter(Format, frozen=True, tag="qwen_xml_parameter"):
    """The older name of JsonSchema with style qwen_xml."""

    json_schema: bool | dict[str, Any]


class Regex(Format, frozen=True, tag="regex"):
    pattern: str


class Ebnf(Format, frozen=True, tag="grammar"):
    grammar: str


class AnyText(Format, frozen=True, tag="any_text"):
    excludes: tuple[str, ...] = ()


class Token(Format, frozen=True, tag="token"):
    """One token, by id or by text."""

    token: int | str


class Sequence(Format, frozen=True, tag="sequence"):
    elements: tuple[AnyFormat, ...]


class Or(Format, frozen=True, tag="or"):
    elements: tuple[AnyFormat, ...]


class Optional(Format, frozen=True, tag="optional"):
    content: AnyFormat


class Star(Format, frozen=True, tag="star"):
    content: AnyFormat


class Plus(Format, frozen=True, tag="plus"):
    content: AnyFormat


class Repeat(Format, frozen=True, tag="repeat"):
    min: int
    max: int  # -1: no limit
    content: AnyFormat


class Tag(Format, frozen=True, tag="tag"):
    begin: str | Token
    content: AnyFormat
    end: str | tuple[str, ...] | Token


class TriggeredTags(Format, frozen=True, tag="triggered_tags"):
    """Free text, in which a trigger must go on as one of the tags that begin with it."""

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    at_least_one: bool = False  # begins with a tag
    stop_after_first: bool = False
    excludes: tuple[str, ...] = ()


class TagsWithSeparator(Format, frozen=True, tag="tags_with_separator"):
    tags: tuple[Tag, ...]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


AnyFormat = (
    ConstString | JsonSchema | QwenXmlParameter | Regex | Ebnf | AnyText | Token | Sequence | Or | Optional | Star | Plus
    | Repeat | Tag | TriggeredTags | TagsWithSeparator
)  # fmt: skip


class _Whole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["structural_tag"]
    format: AnyFormat


class _Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    schema: bool | str | dict[str, Any]  # a string: the schema's JSON
    end: str


class _Legacy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["structural_tag"]
    structures: tuple[_Structure, ...]
    triggers: tuple[str, ...]
    at_least_one: bool = False


def parse(text: str) -> AnyFormat:
    """Raises GrammarError."""
    whole = read_json(text, "structural_tag")
    is_legacy = isinstance(whole, dict) and ("structures" in whole or "triggers" in whole)
    try:
        if is_legacy:
            return _modern(msgspec.convert(whole, _Legacy))
        return msgspec.convert(whole, _Whole).format
    except msgspec.ValidationError as error:
        raise _sentence(str(error)) from None
    except RecursionError:
        raise GrammarError("structural_tag is nested too deeply.") from None


def _modern(legacy: _Legacy) -> TriggeredTags:
    tags = []
    for number, structure in enumerate(legacy.structures):
        schema = structure.schema
        if isinstance(schema, str):
            place = f"structural_tag: structures[{number}].schema"
            schema = read_json(schema, place)  # type: ignore[assignment]
            if not isinstance(schema, dict | bool):
                raise GrammarError(f"{place} must hold an object or a boolean.")
        tags.append(Tag(begin=structure.begin, content=JsonSchema(json_schema=schema), end=structure.end))
    return TriggeredTags(triggers=legacy.triggers, tags=tuple(tags), at_least_one=legacy.at_least_one)


def _sentence(problem: str) -> GrammarError:
    """msgspec's message, with the place in front."""
    what, _, place = problem.partition(" - at `")
    place = re.sub(r"^(key in )?`?\$\.?", "", place).rstrip("`")
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what)
    wrong = re.fullmatch(r"Expected `(.*)`, got `(.*)`", what)
    if missing:
        what = f"{missing[1]} is missing"
    elif unknown:
        what = f"{unknown[1]} is not known here"
    elif wrong:
        what = f"must be {wrong[1]}, not {wrong[2]}"
    else:
        what = f"{what[0].lower()}{what[1:]}"
    return GrammarError(f"structural_tag: {place}{': ' if place and not wrong else ' ' if place else ''}{what}.")
