"""Prompts of requests for vectors to token ids: texts and pairs of texts, cut to what the model takes where that is allowed.

Cutting is left to the tokenizer, whose special tokens stay where they belong, as [SEP] at an encoder's end.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.request_checks import ModelLimits, encode_prompts, too_long
from jaxserve.server.requests import GenerateReqInput, RequestError, TextPair
from jaxserve.server.tokenizer import Tokenizer


def cut_length(req: GenerateReqInput, limits: ModelLimits) -> int | None:
    """What is longer is cut to so many tokens; None: it is refused. `limits` of pooling."""
    if req.truncate_prompt_tokens is None:
        return limits.longest_prompt_len if limits.allow_auto_truncate else None
    return limits.longest_prompt_len if req.truncate_prompt_tokens < 0 else req.truncate_prompt_tokens


def encode_pooled(
    tokenizer: Tokenizer, texts: Sequence[str | TextPair], limits: ModelLimits, cut_to: int | None
) -> list[list[int]]:
    """The ids of each, not whether they fit: only a text that is far too long is refused here."""
    if cut_to is None and isinstance(texts[0], str):
        return encode_prompts(tokenizer, [text for text in texts if isinstance(text, str)], limits)
    most_chars = (cut_to or limits.longest_prompt_len) * tokenizer.longest_token_chars
    if cut_to is None:
        longest = max(num_chars(text) for text in texts)
        if longest > most_chars:
            raise too_long(-(-longest // tokenizer.longest_token_chars), limits, at_least=True)
    elif tokenizer.cuts_ends:  # no more of them is read
        texts = [_shortened(text, most_chars) for text in texts]
    made = tokenizer.encode_texts(texts, type_stride=limits.type_stride, cut_to=cut_to)
    if cut_to is not None and (longest := max(map(len, made))) > cut_to:
        message = f"truncate_prompt_tokens must be at least {longest}, the special tokens of a text, got {cut_to}."
        raise RequestError(message, param="truncate_prompt_tokens")
    return made


def num_chars(text: str | TextPair) -> int:
    return len(text) if isinstance(text, str) else len(text.first) + len(text.second)


def _shortened(text: str | TextPair, most_chars: int) -> str | TextPair:
    return text[:most_chars] if isinstance(text, str) else TextPair(text.first[:most_chars], text.second[:most_chars])
