"""The thinking of a model: what a request says of it, where it stands in the tokens, and how many of these it takes.

The tags are texts. Most models have a token for each; where they do not, a tag is looked for in the text of the last tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.parsers.base import ReasoningFormat
from jaxserve.server.foreign_fields import not_supported
from jaxserve.server.http.body import shown
from jaxserve.server.http.service import GenerationService
from jaxserve.server.openai.protocol import ChatCompletionRequest
from jaxserve.server.requests import RequestError
from jaxserve.types import Thinking

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# By so many last tokens of a prompt a format sees whether the answer begins inside thinking.
_TAIL_TOKENS = 64
# Of a message that is to be continued: its thinking may be long.
_CONTINUED_TAIL_TOKENS = 8192
# A model that thinks says so at once, perhaps behind some white space.
_MOST_BEFORE_THINKING = 16


def thinking_after(
    prompt_ids: list[int], service: GenerationService, reasoning: ReasoningFormat, *, continued: bool
) -> Thinking | None:
    """How the message after this prompt thinks; None: the prompt has ended its thinking."""
    tail = service.decode(prompt_ids[-(_CONTINUED_TAIL_TOKENS if continued else _TAIL_TOKENS) :], False)
    if reasoning.is_open(tail):
        return Thinking(None, reasoning.end)
    has_ended = tail.rstrip().endswith(reasoning.end.strip())
    return None if has_ended or reasoning.begin is None else Thinking(reasoning.begin, reasoning.end)


def wishes_of(body: ChatCompletionRequest) -> tuple[str | float | None, bool | None]:
    """How hard the model shall think, and whether it shall at all; None: the template decides. Raises RequestError."""
    given = _object(body.reasoning, "reasoning", ("effort", "reasoning_effort", "enabled", "enable"))
    kind = _object(body.thinking, "thinking", ("type",)).get("type")
    if kind not in (None, "enabled", "disabled"):
        raise _wrong("thinking.type", "enabled or disabled", kind)
    enabled = given.get("enabled", given.get("enable", None if kind is None else kind == "enabled"))
    if not isinstance(enabled, bool | None):
        raise _wrong("reasoning.enabled", "true or false", enabled)
    effort = given.get("effort", given.get("reasoning_effort", body.reasoning_effort))
    if effort is None:
        return None, enabled
    check_effort(effort)
    return effort, effort != "none"


def check_effort(effort: Any) -> None:
    is_number = isinstance(effort, int | float) and not isinstance(effort, bool)
    if not (effort in EFFORTS if isinstance(effort, str) else is_number and 0 <= effort <= 0.99):
        raise _wrong("reasoning_effort", f"one of {', '.join(EFFORTS)}, or a number in [0, 0.99]", effort)


def _object(value: dict[str, Any] | None, where: str, known: Sequence[str]) -> dict[str, Any]:
    given = {name: part for name, part in (value or {}).items() if part is not None}
    for name in given:
        if name not in known:
            raise not_supported(f"{where}.{name}")
    return given


def _wrong(where: str, rule: str, value: Any) -> RequestError:
    return RequestError(f"{where} must be {rule}, got {shown(value)}.", param=where.partition(".")[0])


# --- in tokens


@dataclasses.dataclass(frozen=True)
class Tag:
    """A tag of thinking in tokens."""

    text: str
    token_id: int | None  # where one token is just the tag
    decode: Callable[[list[int], bool], str]

    @staticmethod
    def of(text: str, service: GenerationService) -> Tag:
        ids = service.tokenizer.encode(text.strip(), add_special_tokens=False)
        return Tag(text.strip(), ids[0] if len(ids) == 1 else None, service.decode)

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
