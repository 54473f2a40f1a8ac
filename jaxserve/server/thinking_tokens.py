"""How many tokens of an output are thinking.

The tags are texts. Most models have a token for each; where they do not, a tag is looked for in the text of the last tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

from jaxserve.types import Thinking, ThinkingTag

# A model that thinks says so at once, perhaps behind some white space.
_MOST_BEFORE_THINKING = 16


class TextTokenizer(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class Texts(Protocol):
    """http.service.GenerationService is one."""

    @property
    def tokenizer(self) -> TextTokenizer: ...

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...


def counter_of(thinking: Thinking | None, texts: Texts) -> Callable[[], ThinkingTokens] | None:
    """What makes a counter for each sequence that thinks so; None: they do not."""
    if thinking is None:
        return None
    begin = None if thinking.begin is None else Tag.of(thinking.begin, texts)
    return functools.partial(ThinkingTokens, begin, Tag.of(thinking.end, texts))


def tag_of(text: str, tokenizer: TextTokenizer) -> ThinkingTag:
    ids = tokenizer.encode(text.strip(), add_special_tokens=False)
    return ThinkingTag(text.strip(), ids[0] if len(ids) == 1 else None)


@dataclasses.dataclass(frozen=True)
class Tag:
    """A tag of thinking in tokens."""

    text: str
    token_id: int | None  # where one token is just the tag
    decode: Callable[[list[int], bool], str]

    @staticmethod
    def of(text: str, texts: Texts) -> Tag:
        return Tag(*tag_of(text, texts.tokenizer), texts.decode)

    @property
    def most_tokens(self) -> int:
        """It has no more than this."""
        return 1 if self.token_id is not None else len(self.text.encode())

    def end_in(self, ids: list[int], seen: int) -> int | None:
        """The number of tokens up to its first end behind `seen` of them."""
        if self.token_id is not None:
            return ids.index(self.token_id, seen) + 1 if self.token_id in ids[seen:] else None
        if self.text not in self.decode(ids, False):
            return None
        low, high = seen, len(ids)  # it ends within these
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.text in self.decode(ids[:middle], False) else (middle, high)
        return high


class ThinkingTokens:
    """Counts those of one sequence, from its first token to the tag that ends thinking."""

    __slots__ = ("_begin", "_end", "_last", "count")

    def __init__(self, begin: Tag | None, end: Tag) -> None:
        """`begin`: where the sequence thinks only if it says so first."""
        self._begin = begin
        self._end: Tag | None = end  # None: nothing more to find
        self._last: list[int] = []  # the tokens in which a part of a tag may stand
        self.count = 0

    def add(self, ids: list[int]) -> None:
        if self._end is None:
            return
        if self._begin is not None:
            ids = self._last = self._last + ids
            if not self._has_begun(self._begin):
                return
            self._begin, self._last = None, []
        found = self._end.end_in(self._last + ids, len(self._last))
        if found is not None:
            self.count += found - len(self._last)
            self._end = None
            return
        self.count += len(ids)
        self._last = (self._last + ids)[1 - self._end.most_tokens :] if self._end.most_tokens > 1 else []

    def _has_begun(self, begin: Tag) -> bool:
        """From all tokens so far. If the sequence does not think, there is nothing more to find."""
        text = begin.decode(self._last[: begin.most_tokens + _MOST_BEFORE_THINKING], False).lstrip()
        if not begin.text.startswith(text[: len(begin.text)]):
            self._end = None
        return text.startswith(begin.text)
