"""GrammarQueue: requests leave it once, in order of arrival, however their grammar or they themselves end."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.grammar import CompiledGrammar, GrammarError
from jaxserve.scheduler.grammar_queue import GrammarQueue
from jaxserve.scheduler.req import Req, RequestState
from jaxserve.types import Grammar, SamplingParams


class FakeCompiled:
    """A CompiledGrammar whose matchers are a string that says how they were made."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar

    def matcher(self, *, ignore_eos: bool = False) -> str:
        return f"{self.grammar.text}{' without eos' if ignore_eos else ''}"


class FakeFuture:
    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.done = False
        self.error: Exception | None = None
        self.is_abandoned = False

    def result(self) -> CompiledGrammar:
        assert self.done and not self.is_abandoned
        if self.error is not None:
            raise self.error
        return FakeCompiled(self.grammar)  # type: ignore[return-value]

    def abandon(self) -> None:
        assert not self.is_abandoned
        self.is_abandoned = True


class FakeCompiler:
    def __init__(self) -> None:
        self.futures: dict[str, FakeFuture] = {}

    def submit(self, grammar: Grammar) -> FakeFuture:
        self.futures[grammar.text] = FakeFuture(grammar)
        return self.futures[grammar.text]


class Queue:
    def __init__(self) -> None:
        self.compiler = FakeCompiler()
        self.queue = GrammarQueue(self.compiler)

    def push(self, pattern: str, **sampling: bool) -> Req:
        params = SamplingParams(regex=pattern, **sampling)
        req = Req(rid=pattern, prompt_ids=np.zeros(3, np.int32), sampling=params, max_new_tokens=1, seed=0)
        assert params.grammar is not None
        self.queue.push(req, params.grammar)
        return req

    def compile(self, *patterns: str, error: str | None = None) -> None:
        for pattern in patterns:
            future = self.compiler.futures[pattern]
            future.done, future.error = True, None if error is None else GrammarError(error)


@pytest.fixture
def made() -> Queue:
    return Queue()


def test_a_request_waits_until_its_grammar_is_compiled(made: Queue) -> None:
    req = made.push("a")
    assert req.state is RequestState.COMPILING and len(made.queue) == 1
    compiled = made.queue.poll()
    assert not compiled.ready and not compiled.failed and req.matcher is None
    made.compile("a")
    assert made.queue.poll().ready == [req]
    assert req.state is RequestState.WAITING and req.matcher == "a"
    assert len(made.queue) == 0
    assert made.queue.poll().ready == []


def test_they_leave_in_order_of_arrival_and_overtake_who_is_not_ready(made: Queue) -> None:
    a, _, c = made.push("a"), made.push("b"), made.push("c")
    made.compile("c", "a")
    assert made.queue.poll().ready == [a, c]
    assert len(made.queue) == 1


def test_a_grammar_that_cannot_be_used_is_a_400(made: Queue) -> None:
    req, good = made.push("(("), made.push("b")
    made.compile("((", error="regex: unclosed group.")
    made.compile("b")
    compiled = made.queue.poll()
    ((failed, reason),) = compiled.failed
    assert failed is req and compiled.ready == [good]
    assert (reason.type, reason.status_code, reason.message) == ("abort", 400, "regex: unclosed group.")
    req.finish(reason)
    assert len(made.queue) == 0 and req.is_finished


def test_an_unexpected_error_is_a_500_of_that_request(made: Queue) -> None:
    req, good = made.push("a"), made.push("b")
    made.compile("a", "b")
    made.compiler.futures["a"].error = RuntimeError("the library is broken")
    compiled = made.queue.poll()
    ((failed, reason),) = compiled.failed
    assert failed is req and compiled.ready == [good]
    assert reason.status_code == 500 and "broken" not in (reason.message or ""), "what it says is for the log"


def test_who_is_aborted_or_late_leaves_at_once(made: Queue) -> None:
    a, b = made.push("a"), made.push("b")
    made.queue.remove([a])
    assert made.compiler.futures["a"].is_abandoned and not made.compiler.futures["b"].is_abandoned
    assert len(made.queue) == 1
    made.compile("a", "b")
    assert made.queue.poll().ready == [b]


def test_ignore_eos_reaches_the_matcher(made: Queue) -> None:
    req = made.push("a", ignore_eos=True)
    made.compile("a")
    made.queue.poll()
    assert req.matcher == "a without eos"
