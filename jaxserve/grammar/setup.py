"""What all grammars of a server are compiled with. Plain data: trials get it through a pipe."""

from __future__ import annotations

import msgspec


class JsonStyle(msgspec.Struct, frozen=True):
    """Where JSON allows white space, the output may have what the pattern matches; without `any_whitespace` none."""

    # Models fall into endless white space where JSON allows it; this is enough for eight levels of indentation by four.
    whitespace_pattern: str = r"[\x20\x0A\x0D\x09]{1,32}"
    any_whitespace: bool = True


class Setup(msgspec.Struct, frozen=True):
    tokenizer_json: str  # as the tokenizers library writes it; empty if there is none
    vocab_size: int  # the model's: ids that the tokenizer does not have are never allowed
    eos_token_ids: tuple[int, ...]
    json_style: JsonStyle = JsonStyle()
