"""Matcher and masks: what is allowed, taking in and taking back tokens, the end of sequence, drafts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from grammar_sampler import accept_all, allow_all, allowed_ids
from tokenizers import Tokenizer

from jaxserve.grammar import GrammarCompiler, JsonStyle, MaskFiller, Matcher
from jaxserve.grammar.bits import hold_back
from jaxserve.types import Grammar, GrammarKind

VOCAB_SIZE = 2080
EOS = (2041, 2042)

MakeMatcher = Callable[..., Matcher]


@pytest.fixture
def match(compiler: GrammarCompiler) -> MakeMatcher:
    """match(regex) is a fresh matcher."""
    return lambda pattern, **how: compiler.submit(Grammar("regex", pattern)).result().matcher(**how)


@pytest.fixture(scope="session")
def ids(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """The ids of a text's characters, one by one."""
    return lambda text: [tokenizer.token_to_id(character) for character in text]


def allowed(matcher: Matcher) -> list[int]:
    mask = allow_all(1, VOCAB_SIZE)
    matcher.fill_mask(mask[0])
    return allowed_ids(mask[0]).tolist()


def test_a_mask_is_a_bit_per_token_and_leaves_padding_out(match: MakeMatcher, tokenizer: Tokenizer) -> None:
    mask = allow_all(1, VOCAB_SIZE)[0]
    match("(?s).*").fill_mask(mask)
    bits = [bool(mask[token // 32] >> (token % 32) & 1) for token in range(VOCAB_SIZE)]
    for token in range(VOCAB_SIZE):
        added = tokenizer.get_added_tokens_decoder().get(token)
        is_text = token < tokenizer.get_vocab_size() and not added  # <tool_call> is marked as text, and is left out as well
        # A token that is a part of a character only may stand where the rest can follow.
        if bits[token]:
            assert is_text or token in EOS, token
        elif is_text:
            assert "\ufffd" in tokenizer.decode([token]), tokenizer.id_to_token(token)


def test_words_beyond_the_vocabulary_are_unset(tokenizer_json: str) -> None:
    compiler = GrammarCompiler(tokenizer_json, 2050, (2041,))
    try:
        matcher = compiler.submit(Grammar("regex", ".*")).result().matcher()
    finally:
        compiler.close()
    mask = allow_all(1, 2050)
    assert mask.shape == (1, 65)
    matcher.fill_mask(mask[0])
    assert allowed_ids(mask[0]).max() < 2050


def test_only_what_the_grammar_allows_is_accepted(match: MakeMatcher, ids: Callable[[str], list[int]]) -> None:
    a, b, x = ids("abx")
    matcher = match("ab*")
    assert a in allowed(matcher) and x not in allowed(matcher)
    assert not matcher.accept(x) and not matcher.accept(EOS[0]) and not matcher.accept(2075) and not matcher.accept(2043)
    assert matcher.accept(a) and matcher.may_end and not matcher.is_terminated
    assert not matcher.accept(a)
    assert matcher.error is None
    assert accept_all(matcher, [b, b, x, b]) == 2
    assert set(EOS) <= set(allowed(matcher))


def test_at_its_end_a_grammar_allows_eos_alone(match: MakeMatcher, ids: Callable[[str], list[int]]) -> None:
    matcher = match("ab")
    assert accept_all(matcher, ids("ab")) == 2
    assert matcher.is_terminated and matcher.may_end
    assert allowed(matcher) == list(EOS)
    assert not matcher.accept(ids("a")[0])
    assert matcher.accept(EOS[1]) and matcher.is_terminated
    assert not matcher.accept(EOS[0])
    assert allowed(matcher) == list(EOS)


def test_after_eos_nothing_else_is_allowed_even_where_the_grammar_could_go_on(
    match: MakeMatcher, ids: Callable[[str], list[int]]
) -> None:
    matcher = match("ab*")
    assert accept_all(matcher, [*ids("ab"), EOS[0], *ids("b")]) == 3
    assert matcher.is_terminated
    assert allowed(matcher) == list(EOS)
    matcher.rollback(1)
    assert not matcher.is_terminated and set(allowed(matcher)) > set(EOS)


def test_with_ignore_eos_the_output_goes_on_as_long_as_the_grammar_can(
    match: MakeMatcher, ids: Callable[[str], list[int]]
) -> None:
    matcher = match("ab*c?", ignore_eos=True)
    accept_all(matcher, ids("ab"))
    assert matcher.may_end and set(EOS).isdisjoint(allowed(matcher))
    matcher.accept(ids("c")[0])
    assert matcher.is_terminated and allowed(matcher) == list(EOS)


@pytest.mark.parametrize("text", ["ab", "abc"])
def test_tokens_can_be_taken_back(match: MakeMatcher, ids: Callable[[str], list[int]], text: str) -> None:
    """Also after the grammar's end and after eos."""
    matcher = match("abc?")
    masks = [allowed(matcher)]
    tokens = [*ids(text), EOS[0]]
    for token in tokens:
        assert matcher.accept(token)
        masks.append(allowed(matcher))
    for count in range(1, len(tokens) + 1):
        other = matcher.copy()
        other.rollback(count)
        assert allowed(other) == masks[-1 - count], count
        assert accept_all(other, tokens[-count:]) == count
    assert allowed(matcher) == masks[-1]


def test_matchers_of_one_grammar_are_independent(match: MakeMatcher, ids: Callable[[str], list[int]]) -> None:
    one, other = match("(ab|cd)+"), match("(ab|cd)+")
    one.accept(ids("a")[0])
    copy = one.copy()
    copy.accept(ids("b")[0])
    assert other.accept(ids("c")[0]) and one.accept(ids("b")[0]) and not other.accept(ids("b")[0])


def test_masks_along_drafts(match: MakeMatcher, ids: Callable[[str], list[int]]) -> None:
    matcher = match("a?b?c*")
    a, b, c, x = ids("abcx")
    for drafts, num_good in ([a, b, c], 3), ([a, x, c], 1), ([x, a], 0), ([], 0), ([a, b, EOS[0]], 3), ([a, b, EOS[0], c], 3):
        masks = np.zeros((len(drafts) + 1, VOCAB_SIZE // 32), np.int32)
        assert matcher.fill_masks_along(drafts, masks) == num_good
        other = matcher.copy()
        for place in range(num_good + 1):
            assert allowed_ids(masks[place]).tolist() == allowed(other), (drafts, place)
            accept_all(other, drafts[place : place + 1])
        assert (masks[num_good + 1 :] == -1).all()
        assert a in allowed(matcher)


def test_a_batch_is_filled_like_its_matchers_one_by_one(match: MakeMatcher, ids: Callable[[str], list[int]]) -> None:
    patterns = ["a+", "[0-9]{2}", "(yes|no)", ".*", "xy?"]
    matchers = [match(pattern, ignore_eos=i == 3) for i, pattern in enumerate(patterns)]
    accept_all(matchers[4], ids("xy"))
    out = allow_all(8, VOCAB_SIZE)
    filler = MaskFiller(2)
    filler.fill(matchers, [6, 0, 3, 2, 1], out)
    for row, matcher in zip([6, 0, 3, 2, 1], matchers, strict=True):
        assert allowed_ids(out[row]).tolist() == allowed(matcher)
    assert (out[[4, 5, 7]] == -1).all()
    one = allow_all(2, VOCAB_SIZE)
    filler.fill(matchers[:1], [1], one)
    assert (one[1] == out[6]).all() and (one[0] == -1).all()
    filler.fill([], [], one)


def test_held_back_tokens_go_unless_nothing_else_is_left(match: MakeMatcher, ids: Callable[[str], list[int]]) -> None:
    matcher = match("ab*")
    matcher.accept(ids("a")[0])
    mask = allow_all(1, VOCAB_SIZE)[0]
    matcher.fill_mask(mask)
    hold_back(mask, EOS)
    assert set(EOS).isdisjoint(allowed_ids(mask)) and mask.any()
    ended = match("a")
    ended.accept(ids("a")[0])
    ended.fill_mask(mask)
    hold_back(mask, [EOS[0], 31, 63, 0])
    hold_back(mask, EOS)
    assert allowed_ids(mask).tolist() == [EOS[1]]


def test_an_eos_that_is_text_too_is_allowed_only_at_the_end(tokenizer_json: str, ids: Callable[[str], list[int]]) -> None:
    newline = 198
    compiler = GrammarCompiler(tokenizer_json, VOCAB_SIZE, (ids("z")[0], newline))
    try:
        matcher = compiler.submit(Grammar("regex", "[a-z]{2,3}")).result().matcher()
    finally:
        compiler.close()
    assert ids("z")[0] not in allowed(matcher) and not matcher.accept(ids("z")[0])
    assert accept_all(matcher, ids("ab")) == 2
    assert ids("z")[0] in allowed(matcher)
    assert matcher.accept(ids("z")[0]) and matcher.is_terminated


def test_a_grammar_that_grows_too_complex_says_so(compiler: GrammarCompiler, ids: Callable[[str], list[int]]) -> None:
    matcher = compiler.submit(Grammar("regex", r"(\p{L}{1,1000}\s?){1000}")).result().matcher()
    rng = np.random.default_rng(0)
    for _ in range(100):
        mask = allow_all(2, VOCAB_SIZE)
        MaskFiller(1).fill([matcher, matcher.copy()], [0, 1], mask)
        if matcher.error:
            break
        matcher.accept(int(rng.choice(allowed_ids(mask[0]))))
    assert matcher.error and matcher.error.startswith("The grammar is too complex to follow: lexer error: ")
    assert matcher.error.endswith(".") and not matcher.is_terminated
    assert not matcher.accept(ids("a")[0]) and not matcher.accept(EOS[0])


def test_digits_and_word_characters_are_asciis(match: MakeMatcher, tokenizer: Tokenizer) -> None:
    for text, is_taken in ("7_", True), ("7a", True), ("７a", False), ("7é", False), ("٣a", False):
        ids = tokenizer.encode(text).ids
        assert (accept_all(match(r"[\d]\w"), ids) == len(ids)) is is_taken, text


@pytest.mark.parametrize("schema", ['{"type": "array", "items": {"type": "integer"}}', "{}", "true", "$$ANY$$"])
def test_white_space_in_json_comes_to_an_end(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: str) -> None:
    compiled = compiler.submit(Grammar("json_schema", schema)).result()
    for count, is_taken in (0, True), (32, True), (33, False):
        ids = tokenizer.encode(f"[{' ' * count}1,\n2]").ids
        matcher = compiled.matcher()
        assert (accept_all(matcher, ids) == len(ids)) is is_taken, count


@pytest.mark.parametrize(
    ("style", "taken", "refused"),
    [
        (JsonStyle(any_whitespace=False), ["[1,2]"], ["[1, 2]", "[ 1,2]"]),
        (JsonStyle(r"[\n\t ]*"), ["[1,2]", f"[1,{' ' * 50}2]"], ["[1,\r2]"]),
        (JsonStyle(" ?"), ["[1,2]", "[ 1, 2]"], ["[1,  2]"]),
    ],
)
@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_white_space_in_json_is_the_servers_choice(
    tokenizer_json: str, tokenizer: Tokenizer, style: JsonStyle, taken: list[str], refused: list[str], kind: GrammarKind
) -> None:
    schema = '{"type": "array", "items": {"type": "integer"}}'
    tag = f'{{"type": "structural_tag", "format": {{"type": "json_schema", "json_schema": {schema}}}}}'
    compiler = GrammarCompiler(tokenizer_json, VOCAB_SIZE, EOS, json_style=style)
    try:
        compiled = compiler.submit(Grammar(kind, schema if kind == "json_schema" else tag)).result()
    finally:
        compiler.close()
    for text in (*taken, *refused):
        ids = tokenizer.encode(text).ids
        assert (accept_all(compiled.matcher(), ids) == len(ids)) is (text in taken), text
