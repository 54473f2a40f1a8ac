"""The `suffix` of a completion: the prompt as a model trained to fill in the middle reads it.

Which tokens stand around prefix and suffix, the vocabulary shows: all of a family's tags are tokens of it.
"""

from __future__ import annotations

import dataclasses

from jaxserve.server.foreign_fields import not_supported
from jaxserve.server.http.service import TextTokenizer


@dataclasses.dataclass(frozen=True)
class FimFormat:
    prefix: str
    suffix: str
    middle: str = ""  # before what the model fills in
    suffix_first: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(tag for tag in (self.prefix, self.suffix, self.middle) if tag)

    def prompt(self, before: str, after: str) -> str:
        parts = (
            (self.suffix + after, self.prefix + before) if self.suffix_first else (self.prefix + before, self.suffix + after)
        )
        return "".join((*parts, self.middle))


_FORMATS = (
    FimFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    FimFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    FimFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FimFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    FimFormat("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    FimFormat("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)


def with_suffix(prompts: list[str], suffix: str, tokenizer: TextTokenizer) -> list[str]:
    """Raises RequestError if the model has no such tokens."""
    for known in _FORMATS:
        if all(len(tokenizer.encode(tag, add_special_tokens=False)) == 1 for tag in known.tags):
            return [known.prompt(prompt, suffix) for prompt in prompts]
    raise not_supported("suffix", "is not available: the model's vocabulary has no tokens for filling in the middle")
