"""A request's grammar as llguidance reads it. Knows the dialects; whether the grammar is any good, compiling finds out."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, regex_to_lark

from jaxserve.grammar import ebnf, json_schema, lark, tag_formats, tag_lark
from jaxserve.grammar.errors import GrammarError
from jaxserve.grammar.json_text import read_json
from jaxserve.grammar.setup import JsonStyle
from jaxserve.grammar.tokenizer import GrammarTokenizer
from jaxserve.types import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# What SGLang's users write for "any JSON".
_ANY_JSON = "$$ANY$$"
# \d and \w are ASCII's, as in JSON schemas and in SGLang, not Unicode's.
_ASCII_CLASSES = "dw"


@dataclasses.dataclass(frozen=True)
class Source:
    text: str
    parts: dict[str, str] = dataclasses.field(default_factory=dict)  # by place: what may be at fault if the whole is no good


def to_llguidance(grammar: Grammar, tokenizer: GrammarTokenizer, style: JsonStyle) -> Source:
    """Raises GrammarError."""
    match grammar.kind:
        case "json_schema":
            return Source(_of_schema(grammar.text, style))
        case "regex":
            return Source(_of_regex(grammar.text, "regex"))
        case "ebnf":
            return Source(str(LLMatcher.grammar_from_lark(lark.to_lark(ebnf.parse(grammar.text)))))
        case "structural_tag":
            return _of_structural_tag(grammar.text, tokenizer, style)


def _of_regex(text: str, place: str) -> str:
    return str(LLMatcher.grammar_from_lark(f"start: /{_lark_regex(text, place)}/"))


def _lark_regex(text: str, place: str) -> str:
    if (len(text) - len(text.rstrip("\\"))) % 2:  # the library would drop it
        raise GrammarError(f"{place}: the regular expression is not valid: it ends with a lone backslash.")
    return str(regex_to_lark(text, _ASCII_CLASSES))


def _of_schema(text: str, style: JsonStyle) -> str:
    schema = True if text == _ANY_JSON else read_json(text, "json_schema")
    if schema is True:  # any value; the library takes options with objects only
        schema, text = {}, "{}"
    known = _with_known_formats(schema, "json_schema")
    if known != schema:
        text = json.dumps(known, ensure_ascii=False)
    try:
        return str(LLMatcher.grammar_from_json_schema(text, defaults=_options(style) if isinstance(schema, dict) else None))
    except ValueError as error:
        raise GrammarError(f"json_schema: {error}.") from error


def _with_known_formats(schema: object, what: str) -> object:
    try:
        return json_schema.without_unknown_formats(schema)
    except RecursionError:
        raise GrammarError(f"{what} is nested too deeply.") from None


def _options(style: JsonStyle) -> JsonCompileOptions:
    return {"whitespace_pattern": style.whitespace_pattern} if style.any_whitespace else {"whitespace_flexible": False}


def _of_structural_tag(text: str, tokenizer: GrammarTokenizer, style: JsonStyle) -> Source:
    parts: dict[str, str] = {}
    options = _options(style)

    def regex(pattern: str, place: str) -> str:
        parts[place] = _of_regex(pattern, f"structural_tag: {place}")
        return _lark_regex(pattern, place)

    def schema(value: bool | dict[str, Any], place: str) -> str:
        if value is False:
            raise GrammarError(f"structural_tag: {place}: nothing matches the schema false.")
        given: Any = _with_known_formats(value, f"structural_tag: {place}") if isinstance(value, dict) else {}
        written = json.dumps({**given, "x-guidance": {**options, **given.get("x-guidance", {})}}, ensure_ascii=False)
        parts[place] = str(LLMatcher.grammar_from_json_schema(written))
        return written

    whole = tag_lark.to_lark(tag_formats.parse(text), tokenizer, tag_lark.Dialects(regex, schema))
    return Source(str(LLMatcher.grammar_from_lark(whole)), parts)
