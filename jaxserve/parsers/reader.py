"""Reader: text that comes in pieces, read by generators as if it were there whole.

A read is a generator that yields while it needs text that has not come. What it returns depends on the text alone, never on how
the text was cut; it looks ahead by a bounded number of characters, so that reading a message costs time linear in its length.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeVar

_T = TypeVar("_T")
Read = Generator[None, None, _T]
Sink = Callable[[str], None]

_SPACE = re.compile(r"\s*")


class BrokenCallError(Exception):
    """The text is not what the format says: from here on it is no call."""


class CutOffError(BrokenCallError):
    """The message ends amid what was being read."""


class Tags:
    """Literal texts to look for, none of which begins with another."""

    def __init__(self, *tags: str) -> None:
        self.tags = tags
        self.pattern = _tags_pattern(tags)

    def __add__(self, other: Tags) -> Tags:
        return Tags(*dict.fromkeys((*self.tags, *other.tags)))


@functools.lru_cache(maxsize=256)
def _tags_pattern(tags: Sequence[str]) -> re.Pattern[str]:
    """Matches a tag as the group `tag`, or at the end of the text what may become one."""
    assert not any(one != other and one.startswith(other) for one in tags for other in tags), tags
    begun = "|".join(_beginning(tag) for tag in tags)
    return re.compile(f"(?P<tag>{'|'.join(map(re.escape, tags))})|(?:{begun})\\Z")


def _beginning(tag: str) -> str:
    """A pattern for whatever the tag begins with."""
    pattern = ""
    for char in reversed(tag):
        pattern = re.escape(char) + (f"(?:{pattern})?" if pattern else "")
    return pattern


class Reader:
    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._record: list[str] | None = None

    def push(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self) -> None:
        self._ended = True

    def record(self, text: str) -> None:
        """Remembers what is read from here on, behind `text`."""
        self._record = [text]

    def forget(self) -> str:
        """What has been read since `record`."""
        recorded, self._record = "".join(self._record or []), None
        return recorded

    def _advance(self, to: int) -> str:
        text, self._at = self._text[self._at : to], to
        if self._record is not None and text:
            self._record.append(text)
        return text

    def _more(self) -> Read[None]:
        """Waits for text, of which there must be more."""
        if self._ended:
            raise CutOffError
        yield

    def until(self, tags: Tags, sink: Sink) -> Read[str | None]:
        """Reads up to the first of the tags and returns it; None is the end of the message. The text before goes to `sink`."""
        while True:
            match = tags.pattern.search(self._text, self._at)
            start = len(self._text) if match is None or (self._ended and not match["tag"]) else match.start()
            if start > self._at:
                sink(self._advance(start))
            if match is not None and match["tag"]:
                return self._advance(match.end())
            if self._ended:
                return None
            yield

    def to_the_end(self, sink: Sink) -> Read[None]:
        while True:
            sink(self.rest())
            if self._ended:
                return
            yield

    def until_tag(self, tags: Tags, sink: Sink) -> Read[str]:
        """Reads up to the first of the tags, which must come."""
        tag = yield from self.until(tags, sink)
        if tag is None:
            raise CutOffError
        return tag

    def before(self, pattern: re.Pattern[str], most: int) -> Read[tuple[str, str]]:
        """Reads a text and the delimiter behind it, together at most so long, and returns both."""
        while (match := pattern.search(self._text, self._at, self._at + most)) is None:
            if len(self._text) - self._at >= most:
                raise BrokenCallError
            yield from self._more()
        text = self._text[self._at : match.start()]
        self._advance(match.end())
        return text, match[0]

    def peek(self) -> Read[str]:
        """The next character, which stays."""
        while self._at == len(self._text):
            yield from self._more()
        return self._text[self._at]

    def ahead(self, count: int) -> Read[str]:
        """So many characters, which stay; fewer at the end of the message."""
        while len(self._text) - self._at < count and not self._ended:
            yield
        return self._text[self._at : self._at + count]

    def rest(self) -> str:
        """All that is there."""
        return self._advance(len(self._text))

    def take(self, count: int) -> str:
        """So many characters, which are there."""
        return self._advance(self._at + count)

    def run(self, pattern: re.Pattern[str]) -> str:
        """What matches of the text that is there, perhaps nothing."""
        match = pattern.match(self._text, self._at)
        return self._advance(match.end()) if match is not None else ""

    def word(self, pattern: re.Pattern[str], most: int) -> Read[str]:
        """A run that ends where something else follows, of at most so many characters, which stay."""
        while True:
            match = pattern.match(self._text, self._at)
            end = self._at if match is None else match.end()
            if end - self._at > most:
                raise BrokenCallError
            if end < len(self._text):
                return self._text[self._at : end]
            yield from self._more()

    def space(self) -> Read[str]:
        """White space up to what follows, or to the end of the message."""
        parts = [self.run(_SPACE)]
        while self._at == len(self._text) and not self._ended:
            yield
            parts.append(self.run(_SPACE))
        return "".join(parts)

    def expect(self, *texts: str) -> Read[str]:
        """Reads the one of these that comes next; one must."""
        text = yield from self.accept(*texts)
        if not text:
            raise BrokenCallError
        return text

    def accept(self, *texts: str) -> Read[str]:
        """Reads one of these if it comes next and returns it, else ""."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, texts))]
            for text in texts:
                if rest.startswith(text):
                    return self._advance(self._at + len(text))
            if not any(text.startswith(rest) for text in texts):
                return ""
            yield from self._more()

    def longest_of(self, texts: Collection[str]) -> Read[str]:
        """Reads the longest of these that comes next; at least one must."""
        longest = max(map(len, texts), default=0)
        while True:
            rest = self._text[self._at : self._at + longest]
            if not any(text.startswith(rest) and text != rest for text in texts):
                break
            yield from self._more()
        found = max((text for text in texts if rest.startswith(text)), key=len, default="")
        if not found:
            raise BrokenCallError
        return self._advance(self._at + len(found))
