"""A grammar that grows too complex on the way ends its request with the reason, although the last mask allowed eos alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scheduler_harness import Harness

from jaxserve.types import Grammar

MESSAGE = "The grammar is too complex to follow: out of fuel."


class ComplexMatcher:
    """Takes three tokens, then is in error."""

    is_terminated = False

    def __init__(self) -> None:
        self.num_accepted = 0
        self.state = self

    @property
    def current(self) -> ComplexMatcher:
        return self

    @property
    def error(self) -> str | None:
        return MESSAGE if self.num_accepted == 3 else None

    def is_free_along(self, drafts: Sequence[int]) -> bool:
        return False

    def forced_tokens(self) -> list[int]:
        return []

    def accept(self, token_id: int) -> bool:
        self.num_accepted += 1
        return True

    def fill_mask(self, out: np.ndarray) -> None:
        out[:] = -1 if self.error is None else 0
        out[0] |= 1  # eos, token 0 of the fake runner
        if self.error is None:
            out[0] ^= 1


class ComplexGrammars:
    """Compiler, future and compiled grammar in one."""

    done = True

    def submit(self, grammar: Grammar) -> ComplexGrammars:
        return self

    def result(self) -> ComplexGrammars:
        return self

    def matcher(self, *, ignore_eos: bool) -> ComplexMatcher:
        return ComplexMatcher()


def test_it_is_no_stop(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(grammars=ComplexGrammars())
    rid = harness.submit([1, 2, 3], regex="a*")
    harness.run()
    answer = harness.answer(rid)
    assert answer.finish is not None and (answer.finish.type, answer.finish.message) == ("abort", MESSAGE)
    assert answer.finish.status_code == 400


class FailingMatcher(ComplexMatcher):
    """Forces tokens that it then fails to take."""

    def forced_tokens(self) -> list[int]:
        return [7] * 9

    def accept(self, token_id: int) -> bool:
        assert token_id != 7, "the library fails"
        return True


def test_a_jump_that_fails_ends_its_request_alone(make_harness: Callable[..., Harness]) -> None:
    class Grammars(ComplexGrammars):
        def matcher(self, *, ignore_eos: bool) -> ComplexMatcher:
            return FailingMatcher()

    harness = make_harness(grammars=Grammars())
    rid, other = harness.submit([1, 2, 3], regex="a*"), harness.submit([4, 5], 20, ignore_eos=True)
    harness.run()
    finish = harness.answer(rid).finish
    assert finish is not None and (finish.type, finish.status_code) == ("abort", 500)
    harness.assert_as_expected(other)
