"""gpt-oss: thinking is one of the channels of `harmony`. Calls go on to the tool parser with their tags, and only they."""

from __future__ import annotations

from jaxserve.parsers.base import Parser
from jaxserve.parsers.generator import GeneratorParser
from jaxserve.parsers.harmony import CHANNEL, ENDS, HEADER_END, HEADERS, LONGEST_HEADER, MESSAGE, is_analysis, recipient
from jaxserve.parsers.reader import BrokenCallError, CutOffError, Read

_TAGS = HEADERS + ENDS


class GptOssReasoning:
    begin = f"{CHANNEL}analysis{MESSAGE}"
    end = f"{CHANNEL}final{MESSAGE}"
    other_ends = (f"{CHANNEL}commentary",)
    closing = f"<|end|><|start|>assistant{end}"
    keeps_special_tokens = True

    def is_open(self, prompt_tail: str) -> bool:
        """Not where the prompt has begun the answer."""
        return not prompt_tail.endswith(self.end)

    def parser(self, *, is_open: bool) -> Parser:
        """Text outside all messages is content, so that it says the same of both."""
        return _Parser()


class _Parser(GeneratorParser):
    def _message(self) -> Read[None]:
        tag = yield from self.reader.until(_TAGS, self.out.content)
        while tag is not None:
            if tag in HEADERS.tags:
                tag = yield from self._one(tag)
            else:
                self.out.tag()
                tag = yield from self.reader.until(_TAGS, self.out.content)

    def _one(self, tag: str) -> Read[str | None]:
        """One message behind the beginning of its header; returns the tag that ends it."""
        out = self.out
        self.reader.record(tag)
        try:
            header, _ = yield from self.reader.before(HEADER_END, LONGEST_HEADER)
        except CutOffError:
            self.reader.rest()
            return None
        except BrokenCallError:
            out.content(self.reader.forget())
            return (yield from self.reader.until(_TAGS, out.content))
        text = self.reader.forget()
        if recipient(tag + header) is None:
            out.tag()
            return (yield from self.reader.until(_TAGS, out.reasoning if is_analysis(tag + header) else out.content))
        out.content(text)
        end = yield from self.reader.until(_TAGS, out.content)
        if end in ENDS.tags:
            out.content(str(end))
            return (yield from self.reader.until(_TAGS, out.content))
        return end
