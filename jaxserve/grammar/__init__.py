"""Constrained decoding: grammars compiled to matchers, and matchers to token masks. NumPy and llguidance only.

    future = compiler.submit(sampling.grammar)    at once; the work is done elsewhere
    matcher = future.result().matcher()           once future.done; one matcher per request
    filler.fill([matcher, ...], rows, out)        before each sampling: which tokens may come next
    matcher.accept(token)                         after it; then matcher = matcher.current

A grammar behind thinking (`submit_behind`) is used in the same way; its matcher is free until the answer begins.

Knows nothing of requests, batches or devices.
"""

from jaxserve.grammar.compiler import GrammarCompiler, GrammarFuture
from jaxserve.grammar.errors import GrammarError, NotCompiledError
from jaxserve.grammar.masks import MaskFiller
from jaxserve.grammar.matcher import CompiledGrammar, Matcher
from jaxserve.grammar.setup import JsonStyle
from jaxserve.grammar.thinking import ThinkingGrammar, ThinkingMatcher

__all__ = [
    "CompiledGrammar",
    "GrammarCompiler",
    "GrammarError",
    "GrammarFuture",
    "JsonStyle",
    "MaskFiller",
    "Matcher",
    "NotCompiledError",
    "ThinkingGrammar",
    "ThinkingMatcher",
]
