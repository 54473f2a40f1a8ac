"""GrammarQueue: requests whose grammar is being compiled; they hold nothing yet and go to the waiting queue next.

Who is ready is asked once per round of the loop (`poll`): compiling happens elsewhere and tells nobody. A request leaves
exactly once: ready, failed, or removed by whoever ends it (abort, time-out).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Protocol

from jaxserve.grammar import CompiledGrammar, GrammarError, NotCompiledError, ThinkingGrammar
from jaxserve.scheduler.req import Req, RequestState, unexpected
from jaxserve.types import FinishReason, Grammar, Thinking

logger = logging.getLogger(__name__)

# How long the loop may wait for messages while grammars compile and there is nothing else to do.
POLL_INTERVAL_S = 0.005


class PendingGrammar(Protocol):
    """grammar.GrammarFuture and its likes"""

    @property
    def done(self) -> bool: ...

    def result(self) -> CompiledGrammar | ThinkingGrammar: ...

    def abandon(self) -> None: ...


class Compiler(Protocol):
    """grammar.GrammarCompiler"""

    def submit(self, grammar: Grammar) -> PendingGrammar: ...

    def submit_behind(self, thinking: Thinking, grammar: Grammar) -> PendingGrammar: ...


@dataclasses.dataclass(slots=True)
class Compiled:
    """Who left the queue in one poll, each in order of arrival."""

    ready: list[Req] = dataclasses.field(default_factory=list)  # WAITING, with a matcher
    failed: list[tuple[Req, FinishReason]] = dataclasses.field(default_factory=list)  # to be ended with this reason


class GrammarQueue:
    def __init__(self, compiler: Compiler | None) -> None:
        """Without a compiler no request with a grammar may come."""
        self._compiler = compiler
        self._items: dict[Req, PendingGrammar] = {}  # in order of arrival
        self._num_pushed = 0  # ever; of these:
        self._num_known = 0  # had been compiled before
        self._num_refused = 0
        self._num_late = 0  # took too long

    def __len__(self) -> int:
        return len(self._items)

    def counts(self) -> dict[str, int]:
        return {
            "num_grammar_queue_reqs": len(self._items),
            "num_grammars": self._num_pushed,
            "num_grammar_cache_hits": self._num_known,
            "num_grammars_aborted": self._num_refused,
            "num_grammar_timeouts": self._num_late,
        }

    def push(self, req: Req, grammar: Grammar) -> None:
        """Its grammar may be known already; the next poll says so."""
        assert self._compiler is not None, f"request {req.rid} has a grammar and there is no compiler"
        req.move_to(RequestState.COMPILING)
        if req.thinking is None:
            pending = self._compiler.submit(grammar)
        else:
            pending = self._compiler.submit_behind(req.thinking, grammar)
        self._items[req] = pending
        self._num_pushed += 1
        self._num_known += pending.done

    def poll(self) -> Compiled:
        """Takes out all whose grammar is compiled or refused. Does not wait."""
        compiled = Compiled()
        for req, pending in [(req, pending) for req, pending in self._items.items() if pending.done]:
            del self._items[req]
            try:
                req.matcher = pending.result().matcher(ignore_eos=req.sampling.ignore_eos)
            except GrammarError as error:
                self._num_late += isinstance(error, NotCompiledError)
                self._num_refused += not isinstance(error, NotCompiledError)
                compiled.failed.append((req, FinishReason.abort(str(error), 400, "BadRequestError")))
            except Exception:
                logger.exception("The grammar of request %s could not be compiled.", req.rid)
                compiled.failed.append((req, unexpected("compile the grammar")))
            else:
                req.move_to(RequestState.WAITING)
                compiled.ready.append(req)
        return compiled

    def remove(self, reqs: Sequence[Req]) -> None:
        """Takes out requests that end before their grammar is there."""
        for req in reqs:
            self._items.pop(req).abandon()
