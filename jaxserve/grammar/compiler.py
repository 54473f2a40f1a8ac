"""GrammarCompiler: from a grammar's text to a CompiledGrammar, without stopping whoever asks.

A new grammar goes through two lanes. In the first it has a second; nearly all need milliseconds. Those that need longer go on
to the second lane, where they have their full time and can delay only their like. In both a trial in a child process comes
first (see `trial`); only what passed is compiled in this process, in the lane's thread, with the GIL free.

Results, and the sentences about grammars that cannot be used, are kept by text, so that one schema is compiled once for all the
requests that bring it.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
from collections.abc import Callable, Sequence

from jaxserve.grammar.errors import GrammarError, NotCompiledError
from jaxserve.grammar.lane import Lane
from jaxserve.grammar.matcher import CompiledGrammar
from jaxserve.grammar.prototype import compile_prototype
from jaxserve.grammar.setup import JsonStyle, Setup
from jaxserve.grammar.thinking import ThinkingGrammar, opening
from jaxserve.grammar.tokenizer import GrammarTokenizer, build_tokenizer
from jaxserve.grammar.trial import TrialProcess
from jaxserve.types import Grammar, Thinking

logger = logging.getLogger(__name__)

_FIRST_LANE_S = 1.0
_CACHE_ENTRIES = 256


class _Compilation:
    """One grammar's, for all requests that brought it."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.is_over = threading.Event()
        self.compiled: CompiledGrammar | None = None
        self.error: GrammarError | None = None  # one of the two is set when it is over
        self._num_waiting = 0  # requests that may still ask for the result
        self._is_dropped = False
        self._lock = threading.Lock()

    def join(self) -> bool:
        """One more request waits for it. False if it was given up: that is no answer to a newcomer."""
        with self._lock:
            if self._is_dropped or isinstance(self.error, NotCompiledError):
                return False
            self._num_waiting += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._num_waiting -= 1

    def drop_if_unwanted(self) -> bool:
        with self._lock:
            self._is_dropped = not self._num_waiting
            return self._is_dropped


class GrammarFuture:
    """A grammar that is being compiled, for one request."""

    def __init__(self, compilation: _Compilation) -> None:
        self._compilation = compilation

    @property
    def done(self) -> bool:
        return self._compilation.is_over.is_set()

    def result(self) -> CompiledGrammar:
        """Waits until it is done. Raises GrammarError with the sentence for the user."""
        self._compilation.is_over.wait()
        if self._compilation.compiled is None:
            assert self._compilation.error is not None
            raise self._compilation.error
        return self._compilation.compiled

    def abandon(self) -> None:
        """The request is over: call it once, and do not ask for the result any more. Work nobody waits for is not begun."""
        self._compilation.leave()


class ThinkingFuture:
    """A grammar behind thinking that is being compiled, as a GrammarFuture."""

    def __init__(
        self,
        answer: GrammarFuture,
        begin: GrammarFuture | None,
        thinking: Thinking,
        tokenizer: Callable[[], GrammarTokenizer],
    ) -> None:
        self._answer = answer
        self._begin = begin
        self._thinking = thinking
        self._tokenizer = tokenizer

    @property
    def done(self) -> bool:
        return self._answer.done and (self._begin is None or self._begin.done)

    def result(self) -> ThinkingGrammar:
        answer = self._answer.result()
        begin = None if self._begin is None else self._begin.result()
        return ThinkingGrammar(answer, begin, self._thinking, self._tokenizer())

    def abandon(self) -> None:
        self._answer.abandon()
        if self._begin is not None:
            self._begin.abandon()


class GrammarCompiler:
    """Costs nothing until the first grammar comes. `submit` belongs to one thread."""

    def __init__(
        self,
        tokenizer_json: str | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        json_style: JsonStyle = JsonStyle(),
        timeout_s: float = 10.0,
    ) -> None:
        """`tokenizer_json`: the tokenizer as the tokenizers library writes it; None if there is none of that kind.
        `vocab_size`: the model's, which may be larger than the tokenizer's."""
        self._setup = Setup(tokenizer_json or "", vocab_size, tuple(eos_token_ids), json_style)
        self._first = Lane("grammar", TrialProcess(self._setup, min(_FIRST_LANE_S, timeout_s)))
        self._second = Lane("slow grammar", TrialProcess(self._setup, timeout_s))
        self._cache: collections.OrderedDict[Grammar, _Compilation] = collections.OrderedDict()
        self._tokenizer: GrammarTokenizer | None = None
        self._tokenizer_lock = threading.Lock()

    def submit(self, grammar: Grammar) -> GrammarFuture:
        """Returns at once; for a grammar seen before, the result may be there already."""
        compilation = self._cache.get(grammar)
        if compilation is None or not compilation.join():
            compilation = self._begin(grammar)
        self._cache.move_to_end(grammar)
        return GrammarFuture(compilation)

    def submit_behind(self, thinking: Thinking, grammar: Grammar) -> ThinkingFuture:
        """The same for an output that thinks first."""
        begin = None if thinking.begin is None else self.submit(opening(thinking.begin))
        return ThinkingFuture(self.submit(grammar), begin, thinking, functools.partial(self._get_tokenizer, grammar.kind))

    def close(self) -> None:
        """Kills the child processes; what is being compiled fails."""
        for lane in (self._first, self._second):
            lane.trial.close()

    def _begin(self, grammar: Grammar) -> _Compilation:
        compilation = self._cache[grammar] = _Compilation(grammar)
        compilation.join()
        if len(self._cache) > _CACHE_ENTRIES:
            self._cache.popitem(last=False)
        self._first.put(lambda: self._work(compilation, self._first))
        return compilation

    def _work(self, compilation: _Compilation, lane: Lane) -> None:
        """In a lane's thread."""
        if compilation.drop_if_unwanted():
            return
        kind = compilation.grammar.kind
        try:
            compilation.compiled = self._compile(compilation.grammar, lane)
        except NotCompiledError as error:
            if lane is self._first:
                self._second.put(lambda: self._work(compilation, self._second))
                return
            compilation.error = error
        except GrammarError as error:
            compilation.error = error
        except Exception as error:
            logger.exception("A grammar could not be compiled.")
            compilation.error = GrammarError(f"{kind}: the grammar cannot be compiled: {error}.")
        compilation.is_over.set()

    def _compile(self, grammar: Grammar, lane: Lane) -> CompiledGrammar:
        tokenizer = self._get_tokenizer(grammar.kind)
        lane.trial.check(grammar)
        prototype = compile_prototype(tokenizer, grammar, self._setup.json_style)
        eos, ll = tokenizer.eos_token_ids, tokenizer.ll
        return CompiledGrammar(
            prototype,
            eos,
            text_eos_token_ids=[token for token in eos if not ll.is_special_token(token)],
            hidden_token_ids=[token for token in ll.eos_tokens if token not in eos],
        )

    def _get_tokenizer(self, kind: str) -> GrammarTokenizer:
        if not self._setup.tokenizer_json:
            raise GrammarError(
                f"{kind} needs a fast tokenizer (one that the tokenizers library can load), and this server runs without one."
            )
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = build_tokenizer(self._setup)
            return self._tokenizer
