"""Thinking between two tags: <think>...</think> and its likes."""

from __future__ import annotations

import dataclasses
import re

from jaxserve.parsers.base import Parser
from jaxserve.parsers.generator import GeneratorParser
from jaxserve.parsers.reader import CutOffError, Read, Tags

# What stands between the turns of a conversation, in the templates of most models.
_TURN = re.compile(r"<[|｜][^<>|｜]*[|｜]>|\[/?INST\]|<(?:start|end)_of_turn>|\]~b\]")


@dataclasses.dataclass(frozen=True)
class TaggedFormat:
    begin: str
    end: str
    keeps_special_tokens: bool = False
    # The model thinks even if the prompt does not say so, unless the prompt ends the thinking itself.
    always: bool = False
    # A tag of a call, which some models write amid their thoughts without ending them.
    call_tag: str | None = None

    @property
    def other_ends(self) -> tuple[str, ...]:
        return () if self.call_tag is None else (self.call_tag,)

    @property
    def closing(self) -> str:
        return f"\n{self.end}"

    def is_open(self, prompt_tail: str) -> bool:
        """Also where the message goes on with what the prompt has begun: of the prompt only its own turn counts."""
        turn = _TURN.split(prompt_tail)[-1]
        begun, ended = turn.rfind(self.begin.rstrip()), turn.rfind(self.end)
        return self.always if begun == ended == -1 else begun > ended

    def parser(self, *, is_open: bool) -> Parser:
        return _Parser(self, is_open)


class _Parser(GeneratorParser):
    def __init__(self, tags: TaggedFormat, is_open: bool) -> None:
        super().__init__()
        self._tags = tags
        self._is_open = is_open

    def _message(self) -> Read[None]:
        space = yield from self.reader.space()
        try:
            begins = yield from self.reader.accept(self._tags.begin)
        except CutOffError:
            begins = ""
        if begins or self._is_open:
            self.out.tag()
            yield from self._thoughts()
        else:
            self.out.content(space)
        yield from self.reader.to_the_end(self.out.content)

    def _thoughts(self) -> Read[None]:
        call_tag = self._tags.call_tag
        tags = Tags(self._tags.end, *([call_tag] if call_tag else []))
        tag = yield from self.reader.until(tags, self.out.reasoning)
        if tag is not None:
            self.out.tag()
        if tag == call_tag and tag is not None:
            self.out.content(tag)
