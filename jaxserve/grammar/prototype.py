"""One grammar compiled by llguidance, and its complaints as sentences. May take any time and much memory: see `trial`."""

from __future__ import annotations

import json
import re
import time

from llguidance import LLMatcher, LLParserLimits

from jaxserve.grammar.errors import GrammarError
from jaxserve.grammar.setup import JsonStyle
from jaxserve.grammar.source import Source, to_llguidance
from jaxserve.grammar.tokenizer import GrammarTokenizer
from jaxserve.types import Grammar

# llguidance's own limits; those not named here are its defaults. A state of the lexer takes 1 or 2 kB in each matcher, and what
# a mask may cost bounds how long one request can keep the others waiting: about 15 ms each.
_LIMITS = LLParserLimits(max_lexer_states=50_000, step_lexer_fuel=200_000, step_max_items=50_000, verbose_errors=False)
# Some grammars compile fast and are slow to follow; the first mask tells.
_SLOWEST_MASK_S = 1.0
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_LONGEST_REASON = 300


def compile_prototype(tokenizer: GrammarTokenizer, grammar: Grammar, style: JsonStyle) -> LLMatcher:
    """A matcher at the grammar's beginning, to be copied. Raises GrammarError."""
    source = to_llguidance(grammar, tokenizer, style)
    # Structural tags hold special tokens, and do not spell them.
    spells_special = grammar.kind != "structural_tag" and _holds_any(source.text, tokenizer.special_texts)
    prototype = _matcher(tokenizer, _unforced(source.text) if spells_special else source.text)
    begun_s = time.thread_time()
    if not prototype.is_error():
        prototype.compute_bitmask()
    if prototype.is_error():
        raise GrammarError(f"{grammar.kind}: {_place_at_fault(tokenizer, source)}{reason(prototype)}.")
    took_s = time.thread_time() - begun_s
    if took_s > _SLOWEST_MASK_S:
        raise GrammarError(f"{grammar.kind}: the grammar is too complex: finding the first token takes {took_s:.1f} s.")
    return prototype


def _matcher(tokenizer: GrammarTokenizer, text: str) -> LLMatcher:
    return LLMatcher(tokenizer.ll, text, log_level=0, limits=_LIMITS)


def _holds_any(text: str, words: tuple[str, ...]) -> bool:
    """Also where a regular expression escapes their marks."""
    bare = text.replace("\\", "")
    return any(word in bare for word in words)


def _unforced(text: str) -> str:
    """The same grammar without forced tokens: llguidance would force a special token where its letters must stand, and then
    refuse it."""
    if not text.startswith("{"):
        return _NO_FORCING + text.removeprefix("%llguidance {}")
    (grammar,) = json.loads(text)["grammars"]
    return f"{_NO_FORCING}start: %json {json.dumps(grammar['json_schema'])}"


def _place_at_fault(tokenizer: GrammarTokenizer, source: Source) -> str:
    """The first part that is no good by itself."""
    for place, text in source.parts.items():
        if _matcher(tokenizer, text).is_error():
            return f"{place}: "
    return ""


def reason(matcher: LLMatcher) -> str:
    """Why a matcher is in error: what matters of llguidance's message, without a period."""
    text = matcher.get_error().split("\n<state>", 1)[0]
    if text.startswith("NoExtension"):
        return "no text can match this grammar"
    about_regex = re.search(r"^error: (.*)$", text, re.MULTILINE)
    if about_regex:
        text = f"the regular expression is not valid: {about_regex[1]}"
    else:
        text = text.split("\n", 1)[0]
        text = re.sub(r"^(at )?\d+\(\d+\): ", "", text).removeprefix("failed to compile JSON schema: ")
        text = re.sub(r'^invalid regex ".*" \(in regex\): ', "the regular expression is not valid: ", text)
    return text.strip()[:_LONGEST_REASON].rstrip(".")
