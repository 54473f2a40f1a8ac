"""A request's grammar as llguidance reads it. Knows the dialects; whether the grammar is any good, compiling finds out."""

from __future__ import annotations

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
    try:
        return str(LLMatcher.grammar_from_json_schema(grammar.text))
    except ValueError as error:
        raise GrammarError(f"json_schema: {error}.") from error
