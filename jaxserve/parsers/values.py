"""A value in a call, as JSON text while it comes.

Models write JSON, but also line breaks within strings, Python's True and 'text', a comma too much; all that becomes JSON. What
cannot is broken. Nesting is bounded, here and so for whoever reads the JSON.
"""

from __future__ import annotations

import json
import re

from jaxserve.parsers.reader import BrokenCallError, CutOffError, Read, Reader, Sink

DEEPEST = 128
_LONGEST_SCALAR = 1024
_SCALAR = re.compile(r"[\w.+-]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]*'), "'": re.compile(r"[^'\"\\\x00-\x1f]*")}
_HEX = {"u": re.compile(r"\\u([0-9a-fA-F]{0,4})"), "x": re.compile(r"\\x([0-9a-fA-F]{0,2})")}
_CLOSERS = {"{": "}", "[": "]", "(": ")"}


def escaped(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def value(reader: Reader, sink: Sink) -> Read[None]:
    """One value; what stands behind it stays. When it breaks, `sink` has what JSON may begin with."""
    closers: list[str] = []  # of the objects and arrays around
    while True:
        if closers and (yield from reader.peek()) == closers[-1]:
            _close(reader, sink, closers)  # an empty one
        else:
            if closers and closers[-1] == "}":
                yield from _key(reader, sink)
            char = yield from reader.peek()
            if char in _CLOSERS:
                yield from _open(reader, sink, closers)
                continue
            yield from string(reader, sink) if char in _PLAIN else _scalar(reader, sink)
        while closers and not (yield from _next(reader, sink, closers)):
            _close(reader, sink, closers)
        if not closers:
            return


def string(reader: Reader, sink: Sink) -> Read[None]:
    quote = reader.take(1)
    sink('"')
    while True:
        sink(reader.run(_PLAIN[quote]))
        char = yield from reader.peek()
        if char == quote:
            break
        if char == "\\":
            yield from _escape(reader, sink)
        elif char < " " or char == '"':
            sink(escaped(reader.take(1)))
    reader.take(1)
    sink('"')


def as_json(text: str) -> str | None:
    """The JSON of a text that holds one value and nothing else, or None."""
    reader, parts = Reader(), list[str]()
    reader.push(text.strip() + " ")
    reader.end()
    try:
        for _ in value(reader, parts.append):
            pass
    except BrokenCallError:
        return None
    return None if reader.rest().strip() else "".join(parts)


def _open(reader: Reader, sink: Sink, closers: list[str]) -> Read[None]:
    if len(closers) == DEEPEST:
        raise BrokenCallError
    char = reader.take(1)
    closers.append(_CLOSERS[char])
    sink("{" if char == "{" else "[")
    sink((yield from reader.space()))


def _close(reader: Reader, sink: Sink, closers: list[str]) -> None:
    reader.take(1)
    sink("}" if closers.pop() == "}" else "]")


def _next(reader: Reader, sink: Sink, closers: list[str]) -> Read[bool]:
    """Behind a member: whether another follows. Else what closes the object or array comes next."""
    space = yield from reader.space()
    if (yield from reader.accept(",")):
        between = "," + space + (yield from reader.space())
        if (yield from reader.peek()) != closers[-1]:
            sink(between)
            return True
    else:
        sink(space)
        if (yield from reader.peek()) != closers[-1]:
            raise BrokenCallError
    return False


def _key(reader: Reader, sink: Sink) -> Read[None]:
    if (yield from reader.peek()) not in _PLAIN:
        raise BrokenCallError
    yield from string(reader, sink)
    space = yield from reader.space()
    yield from reader.expect(":")
    sink(space + ":" + (yield from reader.space()))


def _scalar(reader: Reader, sink: Sink) -> Read[None]:
    word = yield from reader.word(_SCALAR, _LONGEST_SCALAR)
    if _NUMBER.fullmatch(word):
        sink(reader.take(len(word)))
    elif word in _WORDS:
        reader.take(len(word))
        sink(_WORDS[word])
    else:
        raise BrokenCallError


def _escape(reader: Reader, sink: Sink) -> Read[None]:
    """JSON's escapes, Python's of quotes and bytes; any other backslash means itself, as in a pattern."""
    kind = (yield from reader.ahead(2))[1:]
    if not kind:
        raise CutOffError
    if kind in '"\\/bfnrt':
        sink(reader.take(2))
    elif kind == "'":
        reader.take(2)
        sink("'")
    elif kind in _HEX and (digits := (yield from _hex(reader, _HEX[kind], 6 if kind == "u" else 4))):
        sink("\\u" + digits.zfill(4))
    else:
        reader.take(1)
        sink("\\\\")


def _hex(reader: Reader, pattern: re.Pattern[str], length: int) -> Read[str]:
    """The digits of an escape, which is read if it is one."""
    text = yield from reader.ahead(length)
    match = pattern.match(text)
    assert match is not None, text
    if match.end() == length:
        reader.take(length)
        return match[1]
    if match.end() == len(text):
        raise CutOffError
    return ""
