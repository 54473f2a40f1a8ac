"""The scanner against a search of every stretch of the text with Python's `re`, however the text is cut into pieces."""

from __future__ import annotations

import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text.patterns import MAX_NODES
from jaxserve.text.scanner import MAX_MATCH_CHARS, Match, Moves, Scanner, moves_of

CUTS = st.lists(st.integers(1, 4), min_size=1, max_size=5)

# Patterns over the letters a and b that a match's own characters decide.
PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "ab", ".", "[ab]", "[^a]", "", "\\w", "c", "$"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}", "*?", "+?", "??"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
).filter(lambda pattern: re._parser.parse(pattern).getwidth()[1] > 0)  # type: ignore[attr-defined]


def search(moves: Moves, text: str, sizes: list[int] | None = None) -> Match | None:
    scanner, start, turn = Scanner(moves), 0, 0
    while start < len(text):
        end = start + sizes[turn % len(sizes)] if sizes else len(text)
        match = scanner.push(text[start:end])
        if match is not None:
            return match
        start, turn = end, turn + 1
    return None


def search_by_definition(patterns: list[str], text: str) -> Match | None:
    compiled = [re.compile(pattern) for pattern in patterns]
    for end in range(1, len(text) + 1):
        for start in range(end):
            if any(pattern.fullmatch(text, start, end) for pattern in compiled):
                return Match(start, text[start:end])
    return None


@settings(max_examples=400, deadline=None)
@given(st.lists(PATTERNS, min_size=1, max_size=3), st.text("abc", max_size=14), CUTS)
def test_finds_the_match_that_ends_first(patterns: list[str], text: str, sizes: list[int]) -> None:
    moves = Moves(tuple(patterns), ())
    expected = search_by_definition(patterns, text)
    assert search(moves, text) == expected
    assert search(moves, text, sizes) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(PATTERNS, min_size=1, max_size=2), st.text("ab", max_size=14))
def test_never_lets_go_of_what_becomes_a_match(patterns: list[str], text: str) -> None:
    scanner, let_go = Scanner(Moves(tuple(patterns), ())), 0
    for char in text:
        match = scanner.push(char)
        if match is not None:
            assert match.start >= let_go
            return
        assert scanner.held_from >= let_go
        let_go = scanner.held_from


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("^b", "ab", None),
        (r"\Ab", "ba", "b"),
        ("(?m)^b", "a\nb", "b"),
        ("(?m)b$", "bb\n", "b"),
        ("(?m)b$", "bb", None),
        (r"[.!?]\s*$", "One. Two.", "."),
        (r"ab\Z|bc", "abc", "ab"),
        ("a$b", "ab", None),
        (r"\bno\b", "not no", None),
        (r"\bno\b", "not no.", "no"),
        (r"\Bno\B", "no anote", "no"),
        (r"(?a)\bno\b", "éno.", "no"),
        (r"\bno\b", "éno.", None),
        ("(?i)stop", "now StOp it", "StOp"),
        ("(?i:st)op", "STOP STop", "STop"),
        ("(?i)(?-i:s)top", "STOP sTOP", "sTOP"),
        ("(?i)[à-ü]{2}", "xÉÈ", "ÉÈ"),
        ("a.b", "a\nba-b", "a-b"),
        ("(?s)a.b", "a\nb", "a\nb"),
        (r"(?x) a  b # comment", "a ab", "ab"),
        (r"\d{2,3}:", "1:22:", "22:"),
        (r"[^\s\d]", " 1 x", "x"),
        ("[日-本]", "a日", "日"),
        ("a{,2}b", "aaab", "aab"),
        (r"(?P<name>ab)", "ab", "ab"),
        ("[[a]", "[", "["),
    ],
)
def test_python_syntax(pattern: str, text: str, expected: str | None) -> None:
    for sizes in (None, [1]):
        match = search(moves_of((pattern,)), text, sizes)
        assert (match and match.text) == expected


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "is not a regular expression: missing ), unterminated subpattern at position 0."),
        (r"\p{L}", "is not a regular expression: bad escape"),
        ("a{99999999999999999999}", "is not a regular expression: the repetition number is too large."),
        (r"(a)\1", "holds a back reference, which is not supported."),
        ("a(?=b)", "holds a look-around, which is not supported."),
        ("(?<!a)b", "holds a look-around, which is not supported."),
        ("(a)?(?(1)b|c)", "holds a conditional group, which is not supported."),
        ("^", "can match nothing but an empty text."),
        ("", "can match nothing but an empty text."),
        ("(" * 3000 + "a" + ")" * 3000, "is nested too deeply."),
    ],
)
def test_what_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        moves_of((pattern,))
    assert str(caught.value).startswith(f"stop_regex {pattern!r} ")


@pytest.mark.parametrize("pattern", ["(a{100}){100}", "(((a{1000}){1000}){1000}){1000}", "a{0,60000}", "(a|b){2000}"])
def test_size_is_bounded(pattern: str) -> None:
    began_s = time.perf_counter()
    with pytest.raises(ValueError, match=f"{MAX_NODES} characters and branches"):
        moves_of((pattern,))
    assert time.perf_counter() - began_s < 1


def test_strings_are_taken_literally() -> None:
    moves = moves_of(("[0-9]",), ("a.b", "$"))
    assert search(moves, "a-b a.b") == Match(4, "a.b")
    assert search(moves, "x$1") == Match(1, "$")


def test_a_match_longer_than_what_is_held_back() -> None:
    text = "x<" + "y" * 3000 + ">"
    for sizes in (None, [1], [7]):
        match = search(moves_of(("<.*>",)), text, sizes)
        assert match == Match(len(text) - MAX_MATCH_CHARS, text[-MAX_MATCH_CHARS:])


def test_the_search_goes_on_behind_a_match() -> None:
    scanner = Scanner(moves_of((r"\bab", "(?m)^c")))
    assert scanner.push("xab ab") == Match(4, "ab")
    assert scanner.push("ab") is None, "no border of a word, though the search began anew"
    assert scanner.push("\ncd") == Match(9, "c")
    assert scanner.held_from == 10


def test_what_is_remembered_is_bounded_and_found_again() -> None:
    moves = Moves(("(a|b)*a(a|b){9}c",), ())
    scanner = Scanner(moves)
    for i in range(20000):
        scanner.push("ab"[(i * i // 7) % 2] + chr(0x4E00 + i % 5000))
    assert moves._remembered < 40_000
    assert search(moves, "b" * 30 + "abbbbbbbbbc") is not None


def test_time_grows_with_the_text_only() -> None:
    """What makes a backtracking search take for ever."""
    moves = moves_of(tuple(f"(a|aa)+(c|d){i}" for i in range(32)))
    scanner, began_s = Scanner(moves), time.perf_counter()
    assert scanner.push("a" * 20_000) is None
    assert time.perf_counter() - began_s < 2


@pytest.mark.parametrize("pattern", ["(){4000000000}x", "(?:(?:){30000}){30000}x", r"(?:(?:){4000000000}){2,}x"])
def test_nothing_repeated_is_nothing(pattern: str) -> None:
    match = Scanner(Moves((pattern,), ())).push("aax")
    assert match is not None and match.text == "x"


@pytest.mark.parametrize(
    "patterns",
    [
        ["((a{30}){30}){30}"],
        ["(?:b|bb){11}[c]"] * 32,
        ["|".join("a" * 120)] * 32 + [f"[ab]*a[ab]{{{28}}}c"] * 32,
        [r"(?:\\b){100000}x"],
        ["((a{0,30}){0,30})x"],
        ["(?i)" + "".join(f"[{chr(0x400 + 25 * k + i)}-{chr(0x900 + i)}]" for i in range(25)) for k in range(32)],
    ],
)
def test_what_costs_much_is_refused_quickly(patterns: list[str]) -> None:
    started_s = time.process_time()
    with pytest.raises(ValueError, match=r"too large together|different character classes"):
        Moves(tuple(patterns), ())
    assert time.process_time() - started_s < 0.5


def test_the_worst_that_is_served_costs_a_bounded_time_per_character() -> None:
    scanner = Scanner(Moves(tuple(f"a[ab]{{{count}}}c" for count in (200, 200, 200, 200, 150)), ()))
    draw = random.Random(0)
    text = "".join(draw.choice("ab") for _ in range(1000))
    started_s = time.process_time()
    for char in text:
        assert scanner.push(char) is None
    assert time.process_time() - started_s < 5.0, "half a second where this was measured"
