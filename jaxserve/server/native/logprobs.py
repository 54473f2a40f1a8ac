"""Logprobs in SGLang's shape: [logprob, token id, text] for each token, and lists of these for its alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from jaxserve.server.requests import PromptOptions, TokenLogprob

TokenText = Callable[[int], str]
# What is kept of a list of numbers, or of lists, until the reply is made.
Pack = Callable[[list[Any]], Any]


class LogprobColumns:
    """Of a prompt's tokens or of outputs, growing."""

    def __init__(self, options: PromptOptions, token_text: TokenText | None, pack: Pack | None = None) -> None:
        """`token_text` is given if the tokens' text is wanted, `pack` if alternatives are not kept as they are."""
        self._with_top = options.top_logprobs_num > 0
        self._token_ids = options.token_ids_logprob
        self._token_text = token_text
        self._pack: Pack = list if pack is None else pack
        self._tokens: list[list[Any]] = []
        self._top: list[Any] = []
        self._ids: list[Any] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[TokenLogprob]) -> None:
        for token in tokens:
            has_any = token.logprob is not None
            self._tokens.append(self._entry(token.logprob, token.token_id))
            if self._with_top:
                top = [self._entry(value, other) for other, value in token.top]
                self._top.append(self._pack(top) if has_any else None)
            if self._token_ids:
                pairs = zip(token.id_logprobs, self._token_ids, strict=True) if has_any else ()
                self._ids.append(self._pack([self._entry(*pair) for pair in pairs]) if has_any else None)

    def fields(self, side: Literal["input", "output"], first: int = 0) -> dict[str, Any]:
        """Of meta_info, from token `first` on."""
        fields: dict[str, Any] = {f"{side}_token_logprobs": self._tokens[first:]}
        if self._with_top:
            fields[f"{side}_top_logprobs"] = self._top[first:]
        if self._token_ids:
            fields[f"{side}_token_ids_logprobs"] = self._ids[first:]
        return fields

    def _entry(self, logprob: float | None, token_id: int) -> list[Any]:
        return [logprob, token_id, self._token_text(token_id) if self._token_text else None]
