"""The text and the bytes of single tokens, for replies that show logprobs."""

from __future__ import annotations

from collections.abc import Callable

# Plenty for every vocabulary in use; past it the texts are decoded anew.
_MAX_CACHED_TEXTS = 1 << 18


class TokenTexts:
    """The text of single tokens, remembered: twenty alternatives per token make decoding each time the costliest part."""

    def __init__(self, decode: Callable[[list[int], bool], str], token_bytes: Callable[[int], bytes]) -> None:
        self._decode = decode
        self.bytes_of = token_bytes  # of a token that is part of a character its text is U+FFFD
        self._texts: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            if len(self._texts) >= _MAX_CACHED_TEXTS:
                self._texts.clear()
            text = self._texts[token_id] = self._decode([token_id], False)
        return text
