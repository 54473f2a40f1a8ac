"""Every tool format: messages as models write them, cut in every way and cut off everywhere."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from parser_messages import TOOLS, cuts, in_order, joined, parse
from spellings import SPELLINGS, Call

from jaxserve.parsers.base import ToolFormat
from jaxserve.parsers.names import REASONING_NAMES, TOOL_NAMES
from jaxserve.parsers.pieces import CallArguments, Content, Piece
from jaxserve.parsers.reasoning import REASONING_FORMATS
from jaxserve.parsers.tools import TOOL_FORMATS

NASTY = 'São "Paulo"\n\t{[}] <b>&amp;</b> it\'s \\ 東京😀, a=(1), `x` ```json'
PARIS: Call = ("get_weather", {"city": "Paris", "days": 3, "metric": True, "tags": ["a", 1, None], "where": {"lat": 1.5}})
CALLS: dict[str, list[Call]] = {
    "one": [PARIS],
    "one argument": [("get", {"key": "k"})],
    "no arguments": [("now", {})],
    "several": [("get_weather", {"city": "Rome"}), ("now", {}), PARIS],
    "the same twice": [("get", {"key": "a"}), ("get", {"key": "a"})],
    "nasty": [("get_weather", {"city": NASTY, "tags": [NASTY, {"]": ["}"]}], "where": {"a": {"b": {"c": [[], {}]}}}})],
    "empty values": [("get_weather", {"city": "", "tags": [], "where": {}, "days": -1, "metric": False})],
}
TEXTS = ["", "I look it up.", "Two lines,\n\n  and < { [ signs: a[0] <b> {x}"]


@pytest.fixture(params=SPELLINGS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def messages(name: str, texts: Sequence[str] = TEXTS) -> list[tuple[str, str, list[Call]]]:
    """Text, content, calls."""
    return [
        (f"{before}\n{SPELLINGS[name](calls)}", before, calls)
        for calls in CALLS.values()
        for before in texts
        if not (before and name == "json_array")
    ]


def read(name: str, parts: list[str]) -> list[Piece]:
    return in_order(parse(format_of(name).parser(TOOLS), parts))


def test_every_format_is_tried() -> None:
    tried = {format_of(name) for name in SPELLINGS}
    assert tried == set(TOOL_FORMATS.values())


def format_of(name: str) -> ToolFormat:
    return TOOL_FORMATS[name.partition("/")[0]]


def test_calls_are_read(name: str) -> None:
    for text, content, calls in messages(name):
        message = joined(read(name, [text]))
        assert message.parsed_calls == calls
        assert message.content == content


@pytest.mark.parametrize(
    "text", [*TEXTS, "a < b", "```json\n{}\n```", " \n leading and trailing \n ", "[", "<", "<|", "<too", NASTY]
)
def test_what_is_no_call_stays_as_it_is(name: str, text: str) -> None:
    for parts in cuts(text):
        assert read(name, parts) == ([Content(text)] if text else [])


def test_a_message_is_the_same_however_it_is_cut(name: str) -> None:
    for text, _, _ in messages(name, TEXTS[:1] if name == "json_array" else TEXTS[2:]):
        whole = read(name, [text])
        for parts in cuts(text):
            assert read(name, parts) == whole


def test_a_message_cut_off_anywhere_begins_as_the_whole_one(name: str) -> None:
    for text, _, _ in messages(name, TEXTS[:1]):
        whole = read(name, [text])
        for end in range(len(text)):
            parser = format_of(name).parser(TOOLS)
            assert is_beginning(in_order(parser.feed(text[:end])), whole), text[:end]


def is_beginning(some: list[Piece], whole: list[Piece]) -> bool:
    if not some:
        return True
    *done, last = some
    if done != whole[: len(done)] or len(whole) < len(some) or type(last) is not type(whole[len(done)]):
        return False
    match last, whole[len(done)]:
        case (Content(text), Content(all_text)) | (CallArguments(_, text), CallArguments(_, all_text)):
            return all_text.startswith(text)
        case other:
            return other[0] == other[1]
    return False


def test_a_tag_is_never_content(name: str) -> None:
    """Not even a part of it; at a message's end, what may have become one is text as long as it is not a whole tag."""
    for text, content, _ in messages(name, TEXTS[:2]):
        for end in range(len(text)):
            parser = format_of(name).parser(TOOLS)
            streamed = joined(parser.feed(text[:end])).content
            assert content.startswith(streamed), text[:end]
            rest = "".join(piece.text for piece in parser.finish() if isinstance(piece, Content))
            assert content.startswith(streamed + rest) or is_no_call_yet(parser, rest.strip()), text[:end]


def is_no_call_yet(parser: Any, text: str) -> bool:
    return parser.is_text_if_cut_off or any(tag.startswith(text) for tag in parser.begins.tags)


def test_arguments_stream(name: str) -> None:
    """A long string comes as it is generated."""
    text = SPELLINGS[name]([("get", {"key": "x" * 1000})])
    parser = format_of(name).parser(TOOLS)
    pieces = [parser.feed(char) for char in text]
    assert sum(isinstance(piece, CallArguments) for some in pieces for piece in some) > 900


def test_random_damage_breaks_nothing_but_the_message(name: str) -> None:
    rng = random.Random(0)
    texts = [text for text, _, _ in messages(name)]
    for _ in range(200):
        text = damaged(rng.choice(texts), rng)
        whole = read(name, [text])
        joined(whole)
        assert read(name, list(text)) == whole
        assert read(name, random_parts(text, rng)) == whole


def damaged(text: str, rng: random.Random) -> str:
    for _ in range(rng.randrange(1, 4)):
        at, length = rng.randrange(len(text)), rng.choice((0, 1, 1, 5, 30))
        insert = rng.choice(("", '"', "'", "{", "}", "[", ")", "\\", "<", ",", ":", "=", " ", text[at : at + 20], text))
        text = text[:at] + insert + text[at + length :]
        text = text[:3000] or "x"
    return text


def random_parts(text: str, rng: random.Random) -> list[str]:
    ends = sorted(rng.randrange(len(text)) for _ in range(9))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def long_messages(name: str, size: int) -> dict[str, str]:
    one = SPELLINGS[name]([PARIS])
    return {
        "one argument": SPELLINGS[name]([("get", {"key": "lorem ipsum " * (size // 12)})]),
        "text": "Some words. " * (size // 12),
        "white space": " \n" * (size // 2),
        "line breaks": SPELLINGS[name]([("get", {"key": 'a\n"' * (size // 4)})]),
        "numbers": SPELLINGS[name]([("get_weather", {"tags": [1] * (size // 3)})]),
        "calls": "\n".join([one] * (size // len(one))),
        "beginnings": (one[: len(one) // 3] + "\n") * (size // (len(one) // 3)),
        "nested": SPELLINGS[name]([("get", {"key": "k"})]).replace('"k"', "[" * size),
        "a tag": one[: len(one) // 2] + one[:7] * (size // 7),
    }


@pytest.mark.parametrize("name", [name for name in SPELLINGS if "/" not in name])
@pytest.mark.parametrize("step", [10, 1_000_000])
def test_time_is_linear(name: str, step: int) -> None:
    assert seconds(name, long_messages(name, 1_000_000)["one argument"], step) < 8
    for kind, text in long_messages(name, 100_000).items():
        assert seconds(name, text, step) < 2, kind


def seconds(name: str, text: str, step: int) -> float:
    start = time.process_time()
    parse(format_of(name).parser(TOOLS), [text[at : at + step] for at in range(0, len(text), step)])
    return time.process_time() - start


def test_a_message_that_is_given_up_leaves_no_garbage(name: str) -> None:
    """Streams are aborted; nothing of them waits for the garbage collector."""
    text = SPELLINGS[name]([PARIS])
    gc.collect()
    gc.disable()
    try:
        parser = format_of(name).parser(TOOLS)
        parser.feed(text[: len(text) // 2])
        gone = weakref.ref(parser.reader)  # type: ignore[attr-defined]
        del parser
        assert gone() is None
    finally:
        gc.enable()


def test_the_names_of_the_options_are_those_of_the_formats() -> None:
    assert tuple(TOOL_FORMATS) == TOOL_NAMES
    assert tuple(REASONING_FORMATS) == REASONING_NAMES
