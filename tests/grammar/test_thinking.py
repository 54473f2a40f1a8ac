"""Grammars behind thinking: where the answer begins, however the tags are cut into tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from grammar_sampler import accept_all, allow_all, allowed_ids
from tokenizers import Tokenizer

from jaxserve.grammar import GrammarCompiler, Matcher, ThinkingMatcher
from jaxserve.types import Grammar, Thinking

VOCAB_SIZE, EOS = 2080, (2041, 2042)
JSON = Grammar("json_schema", '{"type": "object", "additionalProperties": {"type": "integer"}}')
CALL = 2044  # <tool_call>

Current = Matcher | ThinkingMatcher
Ids = Callable[..., list[int]]


@pytest.fixture
def ids(tokenizer: Tokenizer) -> Ids:
    """The ids of texts, each encoded by itself."""
    return lambda *texts: [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False).ids]


def follow(matcher: Current, tokens: list[int]) -> Current:
    for token in tokens:
        assert matcher.accept(token), token
        matcher = matcher.current
    return matcher


def allowed(matcher: Current) -> set[int]:
    mask = allow_all(1, VOCAB_SIZE)[0]
    matcher.fill_mask(mask)
    return set(allowed_ids(mask).tolist())


def make(compiler: GrammarCompiler, begin: str | None, end: str, grammar: Grammar = JSON) -> ThinkingMatcher:
    return compiler.submit_behind(Thinking(begin, end), grammar).result().matcher()


@pytest.mark.parametrize("cut", [("</think>",), ("</", "think", ">"), ("<", "/t", "hink>"), tuple("</think>")])
def test_the_answer_begins_behind_the_tag(compiler: GrammarCompiler, ids: Ids, cut: tuple[str, ...]) -> None:
    matcher = make(compiler, None, "</think>")
    brace = ids("{")[0]
    matcher_now = follow(matcher, ids("well { </thin", "k <</"))
    assert isinstance(matcher_now, ThinkingMatcher) and matcher_now.is_free_along(ids("x"))
    assert len(allowed(matcher_now)) >= VOCAB_SIZE
    answer = follow(matcher_now, ids("th ", *cut))
    assert isinstance(answer, Matcher) and brace in allowed(answer) and ids("a")[0] not in allowed(answer)
    answer = follow(answer, ids('{"a":1}'))
    assert answer.is_terminated


def test_what_shares_a_token_with_the_tag_belongs_to_the_answer(compiler: GrammarCompiler, ids: Ids) -> None:
    (token,) = ids(" the")
    answer = follow(make(compiler, None, "t", Grammar("regex", "hey")), [token])
    assert isinstance(answer, Matcher) and allowed(answer) == set(ids("y"))
    refused = make(compiler, None, "t", Grammar("regex", "x"))
    assert not refused.accept(token)
    assert token not in allowed(refused) and not refused.is_free_along([])
    assert len(allowed(refused)) >= VOCAB_SIZE - 1
    answer = follow(refused, ids("t"))
    assert isinstance(answer, Matcher) and allowed(answer) == set(ids("x"))


def test_white_space_that_shares_a_token_with_the_tag_is_nobodys(
    compiler: GrammarCompiler, tokenizer: Tokenizer, ids: Ids
) -> None:
    token = next(i for i in range(2041) if (text := tokenizer.decode([i])) != text.rstrip() and text.strip())
    tag = tokenizer.decode([token]).rstrip()
    answer = follow(make(compiler, None, tag), [token])
    assert isinstance(answer, Matcher) and ids("{")[0] in allowed(answer)


def test_special_tokens_are_tags_too(compiler: GrammarCompiler, ids: Ids) -> None:
    answer = follow(make(compiler, None, "<tool_call>"), [*ids("a b"), CALL])
    assert isinstance(answer, Matcher)


def test_thinking_that_may_come_first(compiler: GrammarCompiler, ids: Ids) -> None:
    matcher = make(compiler, "<thought>", "</thought>")
    brace, angle = ids("{")[0], ids("<")[0]
    assert not matcher.is_free_along([])
    assert {brace, angle} <= allowed(matcher) and not set(ids("abc")) & allowed(matcher)
    answer = follow(matcher, [brace])
    assert isinstance(answer, Matcher) and ids('"')[0] in allowed(answer)


@pytest.mark.parametrize("before", ["{}", "\n{}", "{}{{}}", "{}\n"])
@pytest.mark.parametrize("name", ["think", "thought"])  # a token of the vocabulary, and none
def test_the_tag_before_thinking(compiler: GrammarCompiler, ids: Ids, name: str, before: str) -> None:
    matcher = follow(make(compiler, f"<{name}>", f"</{name}>"), ids(before.format(f"<{name}>")))
    assert isinstance(matcher, ThinkingMatcher) and matcher.is_free_along([])
    answer = follow(matcher, ids(f"x </{name}>", '{"a":'))
    assert isinstance(answer, Matcher) and ids("7")[0] in allowed(answer)


def test_a_special_token_before_thinking(compiler: GrammarCompiler, ids: Ids) -> None:
    matcher = make(compiler, "<tool_call>", "</tool_call>")
    assert {CALL, ids("{")[0]} <= allowed(matcher)
    assert ids("<")[0] not in allowed(matcher)
    matcher_now = follow(matcher, [CALL])
    assert isinstance(matcher_now, ThinkingMatcher) and matcher_now.is_free_along([])


def test_what_is_neither_the_tag_nor_an_answer_is_refused(compiler: GrammarCompiler, ids: Ids) -> None:
    matcher = make(compiler, "<thought>", "</thought>")
    assert follow(matcher, ids("<th")) is matcher
    assert allowed(matcher) == set(ids("ought>")[:1])  # as the tokenizer spells it
    assert not matcher.accept(ids("x")[0])


@pytest.mark.parametrize("begin", [None, "<think>"])
def test_masks_along_drafts_are_those_token_by_token(compiler: GrammarCompiler, ids: Ids, begin: str | None) -> None:
    first = [] if begin is None else ids(begin)
    drafts = [*first, *ids("x</think>"), *ids("{"), ids("a")[0], ids('"')[0]]
    matcher = make(compiler, begin, "</think>")
    masks = allow_all(len(drafts) + 1, VOCAB_SIZE)
    num_good = matcher.fill_masks_along(drafts, masks)
    assert num_good == len(drafts) - 2
    other: Current = make(compiler, begin, "</think>")
    for place in range(num_good + 1):
        assert set(allowed_ids(masks[place]).tolist()) == allowed(other), place
        if place < num_good:
            other = follow(other, drafts[place : place + 1])
    assert (masks[num_good + 1 :] == -1).all()
    free = ids("abc")
    assert matcher.current is matcher and matcher.fill_masks_along(free, masks) == (len(free) if begin is None else 0)


def test_the_end_of_sequence_is_free_while_it_thinks(compiler: GrammarCompiler, ids: Ids) -> None:
    matcher = make(compiler, None, "</think>")
    assert set(EOS) <= allowed(matcher)
    answer = follow(matcher, ids("</think>"))
    assert not set(EOS) & allowed(answer)


def test_errors_of_the_grammar_are_said_as_ever(compiler: GrammarCompiler) -> None:
    future = compiler.submit_behind(Thinking("<think>", "</think>"), Grammar("regex", "("))
    with pytest.raises(ValueError, match=r"^regex: the regular expression is not valid: unclosed group\.$"):
        future.result()
    assert future.done


def test_long_thinking_costs_little(compiler: GrammarCompiler) -> None:
    matcher = make(compiler, None, "</think>")
    tokens = np.random.default_rng(0).integers(300, 2000, 5000).tolist()
    assert accept_all(matcher, tokens) == len(tokens)  # type: ignore[arg-type]
    assert len(matcher._tail) < len("</think>")
