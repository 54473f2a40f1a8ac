"""A request's grammar as llguidance reads it. Knows the dialects; whether the grammar is any good, compiling finds out."""

from __future__ import annotations

import json

from llguidance import LLMatcher

from jaxserve.grammar import ebnf, lark
from jaxserve.grammar.errors import GrammarError
from jaxserve.types import Grammar


def to_llguidance(grammar: Grammar) -> str:
    """Raises GrammarError."""
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.text))
    if grammar.kind == "ebnf":
        return str(LLMatcher.grammar_from_lark(lark.to_lark(ebnf.parse(grammar.text))))
    _check_json(grammar.text)
    return str(LLMatcher.grammar_from_json_schema(grammar.text))


def _check_json(text: str) -> None:
    """llguidance puts the text into a larger one before it reads it; what is not whole by itself must not get there."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise GrammarError(f"json_schema is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise GrammarError("json_schema is nested too deeply.") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
