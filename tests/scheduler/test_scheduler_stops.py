"""Stop strings and patterns: matched when their last token arrives, wherever token borders fall."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from scheduler_harness import Harness, LetterDecoder

from jaxserve.scheduler.stops import StopMatcher, StopPatternMatcher, StopStringMatcher, TokenPieces
from jaxserve.types import FinishReason


class PieceDecoder:
    """Token i stands for pieces[i]; bytes of split characters show as the replacement character until complete."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def decode(self, token_ids: list[int]) -> str:
        return b"".join(self.pieces[token_id] for token_id in token_ids).decode(errors="replace")


def first_match(matcher: StopMatcher, token_ids: list[int]) -> tuple[int, str] | None:
    """(number of tokens when something matched, what)"""
    for end in range(1, len(token_ids) + 1):
        matched = matcher.match(np.array(token_ids[:end], np.int32))
        if matched is not None:
            return end, matched
    return None


def test_a_stop_string_inside_one_token() -> None:
    matcher = StopStringMatcher(TokenPieces(PieceDecoder(b"ab", b"xSTOPy")), ["STOP"])
    assert first_match(matcher, [0, 0, 1, 0]) == (3, "STOP")


def test_a_stop_string_over_many_tokens() -> None:
    matcher = StopStringMatcher(TokenPieces(PieceDecoder(b"S", b"T", b"O", b"P", b"-")), ["STOP"])
    assert first_match(matcher, [4, 0, 1, 4, 0, 1, 2, 3, 4]) == (8, "STOP")


def test_a_stop_string_of_split_characters() -> None:
    pieces = [bytes([byte]) for byte in "é€".encode()]
    matcher = StopStringMatcher(TokenPieces(PieceDecoder(b"a", *pieces)), ["é€"])
    assert first_match(matcher, [0] * 30 + [1, 2, 3, 4, 5, 0]) == (35, "é€")


def test_a_long_stop_string_far_into_the_output() -> None:
    stop = "abcdefghijklmnopqrstuvwxyz" * 4
    matcher = StopStringMatcher(TokenPieces(LetterDecoder()), [stop])
    assert first_match(matcher, [25] * 50 + [i % 26 for i in range(104)]) == (154, stop)


def test_the_earliest_of_several_matches_counts() -> None:
    matcher = StopStringMatcher(TokenPieces(PieceDecoder(b"..ab..")), ["b", "ab"])
    assert first_match(matcher, [0]) == (1, "ab")


def test_a_stop_string_that_ends_in_a_space_which_tokens_hide() -> None:
    class Stripping(PieceDecoder):
        def decode(self, token_ids: list[int]) -> str:
            return super().decode(token_ids).removeprefix(" ")

    matcher = StopStringMatcher(TokenPieces(Stripping(b"a", b"b", b" ")), ["b "])
    assert first_match(matcher, [0, 1, 0, 2, 1, 2, 0]) == (6, "b ")


def test_tails_are_decoded_only_when_a_stop_string_may_end() -> None:
    class Counting(LetterDecoder):
        calls = 0

        def decode(self, token_ids: list[int]) -> str:
            self.calls += 1
            return super().decode(token_ids)

    decoder = Counting()
    matcher = StopStringMatcher(TokenPieces(decoder), ["xyz"])
    assert first_match(matcher, [0, 1, 2] * 50 + [25, 23, 24, 25]) == (154, "xyz")
    assert decoder.calls == 6 + 2  # each token once by itself, and the tail at each z


def test_the_beginning_of_the_text_is_not_the_beginning_of_the_tail() -> None:
    assert first_match(StopPatternMatcher(LetterDecoder(), [], [], ["^b"]), [0] + [1] * 600) is None
    assert first_match(StopPatternMatcher(LetterDecoder(), [25] * 5, [], ["^b"]), [1, 0]) == (1, "b")


def test_patterns() -> None:
    matcher = StopPatternMatcher(LetterDecoder(), [], [], ["c[d-f]"])
    assert first_match(matcher, [0, 2, 0, 2, 4, 5]) == (5, "ce")


def test_a_pattern_that_matches_nothing_at_all_does_not_stop() -> None:
    matcher = StopPatternMatcher(LetterDecoder(), [], [], ["b*"])
    assert first_match(matcher, [0, 0, 1]) == (3, "b")


def test_what_is_not_a_pattern() -> None:
    with pytest.raises(ValueError, match=r"stop_regex '\(' is not a regular expression"):
        StopPatternMatcher(LetterDecoder(), [], [], ["("])


def test_a_pattern_over_split_characters_and_several_tokens_at_once() -> None:
    pieces = [bytes([byte]) for byte in "é€".encode()]
    matcher = StopPatternMatcher(PieceDecoder(b"a", *pieces), [], [], ["é."])
    assert first_match(matcher, [0, 1, 2, 3, 4, 5, 0]) == (6, "é€")
    matcher = StopPatternMatcher(LetterDecoder(), [], [], ["bc"])
    assert matcher.match(np.array([0, 1], np.int32)) is None
    assert matcher.match(np.array([0, 1, 2, 3, 4], np.int32)) == "bc"


def test_stop_strings_beside_patterns() -> None:
    matcher = StopPatternMatcher(PieceDecoder(b"a.", b"b", b"xyz"), [], ["a.b", "z"], ["y"])
    assert first_match(matcher, [1, 0, 1]) == (3, "a.b")
    matcher = StopPatternMatcher(PieceDecoder(b"a.", b"b", b"xyz"), [], ["a.b", "z"], ["y"])
    assert first_match(matcher, [2]) == (1, "y")


def test_no_pattern_takes_long() -> None:
    patterns = [f"(a|aa)+(c|d){i}" for i in range(32)]
    matcher = StopPatternMatcher(PieceDecoder(b"a"), [], [], patterns)
    began_s = time.monotonic()
    for length in range(1, 1000):
        assert matcher.match(np.zeros(length, np.int32)) is None
    assert time.monotonic() - began_s < 1


# --- through the scheduler


def text_of(harness: Harness, rid: str) -> str:
    return LetterDecoder().decode(harness.answer(rid).token_ids)


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_end_at_their_stop_string(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness(overlap=overlap, text_decoder=LetterDecoder())
    plain = harness.submit([3, 4, 5], max_new=30, ignore_eos=True)
    harness.run()
    text = text_of(harness, plain)
    stop = text[11:14]
    rid = harness.submit([3, 4, 5], max_new=30, ignore_eos=True, stop=["?", stop])
    harness.run()
    assert harness.answer(rid).finish == FinishReason.stop(stop)
    assert text_of(harness, rid) == text[: text.index(stop) + 3]
    assert harness.answer(rid).stops == ["?", stop]


def test_requests_end_at_their_pattern(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(text_decoder=LetterDecoder())
    rid = harness.submit([3, 4, 5], max_new=30, ignore_eos=True, stop_regex=["[a-m]{2}"])
    harness.run()
    finish = harness.answer(rid).finish
    assert finish is not None and isinstance(finish.matched, str) and text_of(harness, rid).endswith(finish.matched)
    assert harness.answer(rid).stop_patterns == ["[a-m]{2}"]


def test_stop_token_ids_hold_under_ignore_eos(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    plain = harness.submit([3, 4, 5], max_new=30, ignore_eos=True)
    harness.run()
    stop_id = harness.answer(plain).token_ids[7]
    rid = harness.submit([3, 4, 5], max_new=30, ignore_eos=True, stop_token_ids=[99, stop_id])
    harness.run()
    harness.assert_as_expected(rid)
    assert harness.answer(rid).finish == FinishReason.stop(stop_id)
    assert sorted(harness.steps[-1].new_rows) == [] and harness.steps[-1].mode.name == "DECODE"


def test_a_stop_at_the_last_permitted_token_is_a_stop(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    plain = harness.submit([3, 4, 5], max_new=1, ignore_eos=True)
    harness.run()
    stop_id = harness.answer(plain).token_ids[0]
    rid = harness.submit([3, 4, 5], max_new=1, stop_token_ids=[stop_id])
    harness.run()
    assert harness.answer(rid).finish == FinishReason.stop(stop_id)


def test_the_device_learns_what_min_new_tokens_holds_back(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    harness.submit([3, 4], max_new=4, min_new_tokens=2, stop_token_ids=[9])
    harness.submit([3, 5], max_new=4, min_new_tokens=2, stop_token_ids=[9], ignore_eos=True)
    harness.run()
    states = harness.steps[0].new_rows
    assert [state.stop_token_ids.tolist() for state in states] == [[0, 9], [9]]
    assert harness.steps[0].needs_adjusting


@pytest.mark.parametrize(
    ("stops", "patterns", "found", "pattern"),
    [
        ([], ["c+d"], "cd", "c+d"),
        ([], ["x", "c+d", "d"], "cd", "c+d"),  # the first in the request of those that end there
        ([], ["x", "d", "c+d"], "cd", "d"),
        ([], ["x", r"\bwab", "b"], "wab", r"\bwab"),
        ([], ["x", r"\bd", "c|dd"], "c", "c|dd"),
        (["cd"], ["c+d", "x"], "cd", None),
        (["xx"], ["c.", "cdd"], "cd", "c."),
    ],
)
def test_which_pattern_it_was(stops: list[str], patterns: list[str], found: str, pattern: str | None) -> None:
    matcher = StopPatternMatcher(LetterDecoder(), [], stops, patterns)
    result = first_match(matcher, [ord(char) - ord("a") for char in "wabcdef"])
    assert result is not None
    assert (result[1], matcher.pattern_of(result[1])) == (found, pattern)


def test_a_reply_names_the_pattern_and_is_cut_at_its_text() -> None:
    reason = FinishReason.stop("cd", "c+d")
    assert reason.matched == "cd"
    assert reason.to_dict() == {"type": "stop", "matched": "c+d"}
