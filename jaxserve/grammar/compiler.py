"""GrammarCompiler: from a grammar's text to a CompiledGrammar, without stopping whoever asks.

Compiling happens in threads; llguidance lets the GIL go. Results, and the sentences about grammars that cannot be used, are
kept by text, so that the requests of one schema compile it once.
"""

from __future__ import annotations

import collections
import concurrent.futures
import threading
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jaxserve.grammar.errors import GrammarError
from jaxserve.grammar.matcher import CompiledGrammar
from jaxserve.grammar.source import to_llguidance
from jaxserve.grammar.tokenizer import build_tokenizer
from jaxserve.types import Grammar

_NUM_THREADS = 2
_CACHE_ENTRIES = 256


class _Compilation:
    """One grammar's, for all requests that brought it."""

    def __init__(self, work: concurrent.futures.Future[CompiledGrammar]) -> None:
        self.work = work
        self.num_waiting = 0  # requests that may still ask for the result


class GrammarFuture:
    """A grammar that is being compiled, for one request."""

    def __init__(self, compilation: _Compilation) -> None:
        self._compilation = compilation
        compilation.num_waiting += 1

    @property
    def done(self) -> bool:
        return self._compilation.work.done()

    def result(self) -> CompiledGrammar:
        """Waits until it is done. Raises GrammarError with the sentence for the user."""
        return self._compilation.work.result()

    def abandon(self) -> None:
        """The request is over: call it once, and do not ask for the result any more. Work nobody waits for is not begun."""
        self._compilation.num_waiting -= 1
        if not self._compilation.num_waiting:
            self._compilation.work.cancel()


class GrammarCompiler:
    """Not thread-safe: belongs to the thread that submits."""

    def __init__(
        self, tokenizer_json: str | None, vocab_size: int, eos_token_ids: Sequence[int], *, timeout_s: float = 10.0
    ) -> None:
        """`tokenizer_json`: the tokenizer as `tokenizers` writes it; None or empty if there is none of that kind."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._timeout_s = timeout_s
        self._pool = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "grammar")
        self._cache: collections.OrderedDict[Grammar, _Compilation] = collections.OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()

    def submit(self, grammar: Grammar) -> GrammarFuture:
        """Returns at once; of a grammar seen before the result may be there already."""
        compilation = self._cache.get(grammar)
        if compilation is None or compilation.work.cancelled():
            compilation = self._cache[grammar] = _Compilation(self._pool.submit(self._compile, grammar))
            if len(self._cache) > _CACHE_ENTRIES:
                self._cache.popitem(last=False)
        self._cache.move_to_end(grammar)
        return GrammarFuture(compilation)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        tokenizer = self._get_tokenizer(grammar)
        prototype = LLMatcher(tokenizer, to_llguidance(grammar), log_level=0, limits=LLParserLimits(verbose_errors=False))
        if not prototype.is_error():
            prototype.compute_bitmask()
        if prototype.is_error():
            raise GrammarError(f"{grammar.kind}: {prototype.get_error()}.")
        hidden = [token for token in tokenizer.eos_tokens if token not in self._eos]
        return CompiledGrammar(prototype, frozenset(self._eos), hidden)

    def _get_tokenizer(self, grammar: Grammar) -> LLTokenizer:
        if not self._tokenizer_json:
            raise GrammarError(
                f"{grammar.kind} needs a fast tokenizer (one that the tokenizers library can load), "
                "and this server runs without one."
            )
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = build_tokenizer(self._tokenizer_json, self._vocab_size, self._eos)
            return self._tokenizer
