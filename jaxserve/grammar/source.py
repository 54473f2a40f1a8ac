"""A request's grammar as llguidance reads it. Knows the dialects; whether the grammar is any good, the compiler finds out."""

from __future__ import annotations

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from jaxserve.grammar.errors import GrammarError
from jaxserve.types import Grammar


def to_llguidance(grammar: Grammar) -> str:
    """Raises GrammarError."""
    try:
        if grammar.kind == "json_schema":
            return str(LLMatcher.grammar_from_json_schema(grammar.text))
        if grammar.kind == "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        return str(LLMatcher.grammar_from_lark(any_to_lark(grammar.text)))
    except Exception as error:
        raise GrammarError(f"{grammar.kind}: {error}.") from error
