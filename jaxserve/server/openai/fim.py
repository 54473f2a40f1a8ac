"""The `suffix` of a completion: the prompt as a model trained to fill in the middle reads it.

Which tokens stand around prefix and suffix, --completion-template says or the vocabulary shows: all tags of a family are tokens
of it.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Literal

import msgspec

from jaxserve.server.foreign_fields import not_supported
from jaxserve.server.tokenizer import TextTokenizer


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
_NAMED = {"qwen_coder": _FORMATS[0], "star_coder": _FORMATS[1], "deepseek_coder": _FORMATS[3]}


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's."""

    name: str
    fim_begin_token: str
    fim_middle_token: str
    fim_end_token: str
    fim_position: Literal["MIDDLE", "END"]  # where the middle's token stands: in place of it, or behind the suffix

    def format(self) -> FimFormat:
        between, behind = self.fim_middle_token, self.fim_end_token
        if self.fim_position == "END":
            between, behind = behind, between
        return FimFormat(self.fim_begin_token, between, behind)


def chosen_format(name_or_file: str | None) -> FimFormat | None:
    """That of --completion-template. Raises ValueError with a sentence."""
    if name_or_file is None or name_or_file in _NAMED:
        return _NAMED.get(name_or_file or "")
    try:
        return msgspec.json.decode(Path(name_or_file).read_bytes(), type=_File).format()
    except OSError as error:
        names = ", ".join(_NAMED)
        raise ValueError(f"--completion-template must be {names} or a JSON file; got {name_or_file!r}: {error}.") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"--completion-template {name_or_file!r}: {error}.") from error


def with_suffix(prompts: list[str], suffix: str, tokenizer: TextTokenizer, chosen: FimFormat | None = None) -> list[str]:
    """In the format that was chosen, or in the one whose tags the vocabulary has. Raises RequestError if there is none."""
    has = functools.partial(_has_tags, tokenizer)
    found = chosen if chosen is not None else next(filter(has, _FORMATS), None)
    if found is None:
        raise not_supported("suffix", "is not available: the model's vocabulary has no tokens for filling in the middle")
    return [found.prompt(prompt, suffix) for prompt in prompts]


def _has_tags(tokenizer: TextTokenizer, known: FimFormat) -> bool:
    return all(len(tokenizer.encode(tag, add_special_tokens=False)) == 1 for tag in known.tags)
