"""Logprobs in OpenAI's two shapes: parallel lists for completions, one object per token for chat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxserve.server.long_json import packed
from jaxserve.server.requests import TokenLogprob
from jaxserve.server.token_texts import TokenTexts


def chat_logprobs(entries: Iterable[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    """{"content": [{token, bytes, logprob, top_logprobs}]}."""
    content = []
    for entry in entries:
        top = [_chat_token(texts, token_id, logprob) for token_id, logprob in entry.top]
        content.append(packed({**_chat_token(texts, entry.token_id, entry.logprob), "top_logprobs": top}))
    return {"content": content}


def _chat_token(texts: TokenTexts, token_id: int, logprob: float | None) -> dict[str, Any]:
    return {"token": texts[token_id], "bytes": list(texts.bytes_of(token_id)), "logprob": logprob}


class CompletionLogprobs:
    """Builds {tokens, token_logprobs, top_logprobs, text_offset} piece by piece; offsets run on through a stream."""

    def __init__(self, texts: TokenTexts, with_top: bool) -> None:
        self._texts = texts
        self._with_top = with_top
        self._text_offset = 0

    def shape(self, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
        tokens, logprobs, top, offsets = [], [], [], []
        for entry in entries:
            text = self._texts[entry.token_id]
            tokens.append(text)
            logprobs.append(entry.logprob)
            alternatives = {self._texts[token_id]: logprob for token_id, logprob in reversed(entry.top)}
            top.append(None if entry.logprob is None else packed(alternatives))
            offsets.append(self._text_offset)
            self._text_offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": top if self._with_top else None,
            "text_offset": offsets,
        }
