"""A request's grammar as llguidance reads it. Knows the dialects; whether the grammar is any good, compiling finds out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from llguidance import LLMatcher, regex_to_lark

from jaxserve.grammar import ebnf, lark
from jaxserve.grammar.errors import GrammarError
from jaxserve.types import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions


# Models fall into endless white space where JSON allows it; this is enough for eight levels of indentation by four.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
# \d and \w are ASCII's, as in JSON schemas and in SGLang, not Unicode's.
_ASCII_CLASSES = "dw"


def to_llguidance(grammar: Grammar) -> str:
    """Raises GrammarError."""
    if grammar.kind == "json_schema":
        return _of_schema(grammar.text)
    if grammar.kind == "regex":
        return _of_regex(grammar.text)
    if grammar.kind == "structural_tag":
        raise GrammarError("structural_tag is not supported yet.")
    return str(LLMatcher.grammar_from_lark(lark.to_lark(ebnf.parse(grammar.text))))


def _of_regex(text: str) -> str:
    if (len(text) - len(text.rstrip("\\"))) % 2:  # the library would drop it
        raise GrammarError("regex: the regular expression is not valid: it ends with a lone backslash.")
    return str(LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, _ASCII_CLASSES)}/"))


def _of_schema(text: str) -> str:
    schema = _read_json(text)
    if schema is True:  # any value; the library takes options with objects only
        schema, text = {}, "{}"
    try:
        return str(LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS if isinstance(schema, dict) else None))
    except ValueError as error:
        raise GrammarError(f"json_schema: {error}.") from error


def _read_json(text: str) -> object:
    """llguidance puts the text into a larger one before it reads it; what is not whole by itself must not get there."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise GrammarError(f"json_schema is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise GrammarError("json_schema is nested too deeply.") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
