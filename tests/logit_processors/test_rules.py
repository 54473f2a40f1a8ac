"""What the named processors rule out, against the plainest way to say it."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.logit_processors.masks import repeating_tokens
from jaxserve.logit_processors.rules import NEVER, TokenRules
from jaxserve.types import LogitRules, NoRepeatNgram, ThinkingBudget, ThinkingTag

VOCAB_SIZE = 70
WORDS = -(-VOCAB_SIZE // 32)
NEWLINE, BEGIN, END = 10, 60, 61


class Letters:
    """Tokens are characters; the tags are tokens of their own."""

    def decode(self, token_ids: list[int]) -> str:
        special = {NEWLINE: "\n", BEGIN: "<think>", END: "</think>"}
        return "".join(special.get(token_id, chr(ord("a") + token_id % 26)) for token_id in token_ids)


def allowed(rules: TokenRules, ids: list[int], mask: np.ndarray | None = None) -> set[int]:
    mask = np.full(WORDS, -1, np.int32) if mask is None else mask.copy()
    rules.restrict(np.array(ids, np.int32), mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return set(np.flatnonzero(bits).tolist())


def everything() -> set[int]:
    return set(range(VOCAB_SIZE))


# --- n-grams


def plainly(ids: list[int], size: int, window: int) -> set[int]:
    seen, last = ids[max(len(ids) - window, 0) :], ids[len(ids) - size + 1 :] if size > 1 else []
    grams = [seen[i : i + size] for i in range(len(seen) - size + 1)]
    return {gram[-1] for gram in grams if gram[:-1] == last} if len(ids) >= size else set()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("window", [1, 3, 10, 1000])
def test_no_ngram_comes_twice(size: int, window: int) -> None:
    rng = np.random.default_rng(size * window)
    for length in [*range(12), 40]:
        ids = rng.integers(0, 4, length).astype(np.int32)
        expected = plainly(ids.tolist(), size, window)
        assert set(repeating_tokens(ids, size, window).tolist()) == expected
        rules = TokenRules(LogitRules(ngram=NoRepeatNgram(size, window, [2])), 0, None)
        assert allowed(rules, ids.tolist()) == everything() - (expected - {2})
        if length < rules.free_len(ids):
            assert not expected


def test_what_a_grammar_forbids_stays_forbidden() -> None:
    mask = np.zeros(WORDS, np.int32)
    mask[0] = 0b1110
    rules = TokenRules(LogitRules(ngram=NoRepeatNgram(1, 10)), 0, None)
    assert allowed(rules, [1, 5, 66], mask) == {2, 3}


# --- thinking


def budget(num_tokens: int, *, is_open: bool, spent: int = 0, one_token: bool = True) -> LogitRules:
    if one_token:
        begin, ends, closing = ThinkingTag("<think>", BEGIN), [ThinkingTag("</think>", END)], [NEWLINE, END]
    else:  # "x" and "yz"
        begin, ends, closing = ThinkingTag("x", None), [ThinkingTag("yz", None)], [NEWLINE, 24, 25]
    return LogitRules(budget=ThinkingBudget(num_tokens, None if is_open else begin, ends, closing, closing[1:], spent))


def forced(rules: TokenRules, ids: list[int]) -> int | None:
    """The token that must come next; its rules are followed as a scheduler does."""
    free_len = rules.free_len(np.array(ids, np.int32))
    left = allowed(rules, ids)
    assert len(left) in (1, VOCAB_SIZE)
    assert len(ids) >= free_len or len(left) == VOCAB_SIZE, "said to be free, and is not"
    return left.pop() if len(left) == 1 else None


def finish(rules: TokenRules, prompt: list[int], free: list[int]) -> list[int]:
    """The outputs of a model that writes `free` where it may."""
    out: list[int] = []
    for token_id in free:
        out.append(token_id if (only := forced(rules, prompt + out)) is None else only)
    return out


@pytest.mark.parametrize(
    ("num_tokens", "spent", "free", "expected"),
    [
        (3, 0, [1] * 8, [1, 1, 1, NEWLINE, END, 1, 1, 1]),
        (3, 2, [1] * 6, [1, NEWLINE, END, 1, 1, 1]),
        (2, 5, [1] * 4, [NEWLINE, END, 1, 1]),
        (0, 0, [1] * 4, [NEWLINE, END, 1, 1]),
        (3, 0, [1, 1, NEWLINE, 1, 1], [1, 1, NEWLINE, END, 1]),
        (3, 0, [1, END, 1, 1, 1, 1, 1], [1, END, 1, 1, 1, 1, 1]),
        (1, 0, [END, BEGIN, 1, 1, 1], [END, BEGIN, 1, 1, 1]),
    ],
)
def test_thinking_that_the_prompt_has_begun_ends(num_tokens: int, spent: int, free: list[int], expected: list[int]) -> None:
    prompt = [5, BEGIN, *[1] * spent]
    rules = TokenRules(budget(num_tokens, is_open=True, spent=spent), len(prompt), Letters())
    assert finish(rules, prompt, free) == expected


@pytest.mark.parametrize(
    ("num_tokens", "free", "expected"),
    [
        (2, [BEGIN, 1, 1, 1, 1, 1], [BEGIN, 1, 1, NEWLINE, END, 1]),
        (0, [NEWLINE, BEGIN, 1, 1, 1], [NEWLINE, BEGIN, NEWLINE, END, 1]),
        (2, [1] * 30, [1] * 30),
        (0, [1] * 20 + [BEGIN, 1, 1], [1] * 20 + [BEGIN, 1, 1]),
    ],
)
def test_thinking_that_the_model_begins_ends(num_tokens: int, free: list[int], expected: list[int]) -> None:
    rules = TokenRules(budget(num_tokens, is_open=False), 1, Letters())
    assert finish(rules, [5], free) == expected


@pytest.mark.parametrize("is_open", [True, False])
def test_tags_of_several_tokens(is_open: bool) -> None:
    rules = TokenRules(budget(2, is_open=is_open, one_token=False), 1, Letters())
    begun = [] if is_open else [23]
    assert finish(rules, [5], [*begun, *[1] * 8]) == [*begun, 1, 1, NEWLINE, 24, 25, 1, 1, 1]
    rules = TokenRules(budget(4, is_open=is_open, one_token=False), 1, Letters())
    assert finish(rules, [5], [*begun, 24, 24, 25, 1, 1, 1, 1, 1]) == [*begun, 24, 24, 25, 1, 1, 1, 1, 1]


def test_when_thinking_is_over_nobody_waits() -> None:
    rules = TokenRules(budget(3, is_open=True), 2, Letters())
    assert rules.free_len(np.array([5, BEGIN], np.int32)) == 5
    assert rules.free_len(np.array([5, BEGIN, 1, 1], np.int32)) == 5
    assert rules.free_len(np.array([5, BEGIN, 1], np.int32)) == 5
    assert rules.free_len(np.array([5, BEGIN, 1, END], np.int32)) == NEVER
    assert rules.free_len(np.array([5, BEGIN, 1], np.int32)) == 5, "the tag was taken back"


def test_drafts_are_judged_one_by_one_and_change_nothing() -> None:
    rules = TokenRules(budget(3, is_open=True), 1, Letters())
    known, drafts = [5, 1, 1], [1, NEWLINE, END, 1]
    found = [allowed(rules, known + drafts[:count]) for count in range(5)]
    assert found == [everything(), {NEWLINE}, {END}, everything(), everything()]
    assert rules.free_len(np.array(known, np.int32)) == 4
    assert allowed(rules, [*known, NEWLINE]) == {END}, "behind the line's end that the model wrote itself"


def test_thinking_that_is_closed_may_repeat_itself() -> None:
    rules = LogitRules(budget(2, is_open=True).budget, NoRepeatNgram(1, 100))
    both = TokenRules(rules, 0, Letters())
    assert allowed(both, [NEWLINE, 1]) == {NEWLINE}
    assert allowed(both, [1, NEWLINE, END]) == everything() - {1, NEWLINE, END}
