"""GenerationChunks of one sequence, put together into SGLang's reply object.

Used by /generate and by the Engine, streaming or not:

    {"text", "output_ids", "meta_info": {"id", "finish_reason", "prompt_tokens", ...}}

`to_dict` gives everything so far (what SGLang streams by default), `delta_dict` what came since it was last called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.server.requests import GenerationChunk, TokenLogprob

TokenText = Callable[[int], str]
Reply = dict[str, Any]


def meta_info(chunk: GenerationChunk, weight_version: str) -> dict[str, Any]:
    """What a reply says about a sequence after this chunk. `weight_version` is that of requests that no weights computed."""
    return {
        "id": chunk.rid,
        "finish_reason": chunk.finish_reason.to_dict() if chunk.finish_reason else None,
        "prompt_tokens": chunk.prompt_tokens,
        "completion_tokens": chunk.completion_tokens,
        "cached_tokens": chunk.cached_tokens,
        "weight_version": chunk.weight_version or weight_version,
        **chunk.meta,
    }


class GenerateReply:
    """One sequence's reply. `index` is its place in a list reply, None for a single one."""

    def __init__(
        self,
        *,
        weight_version: str = "default",
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        token_text: TokenText | None = None,
        index: int | None = None,
    ) -> None:
        self._weight_version = weight_version  # of requests that no weights computed
        self._return_logprob = return_logprob
        self._with_top = return_logprob and top_logprobs_num > 0
        self._token_text = token_text  # given if logprobs are to come with the tokens' text
        self._index = index
        self._text = ""
        self._new_texts: list[str] = []  # not yet part of _text
        self._output_ids: list[int] = []
        self._logprobs: list[list[Any]] = []
        self._top_logprobs: list[list[list[Any]]] = []
        self._last: GenerationChunk | None = None
        self._sent_chars = self._sent_ids = self._sent_logprobs = 0

    @property
    def is_finished(self) -> bool:
        return self._last is not None and self._last.finish_reason is not None

    def add(self, chunk: GenerationChunk) -> None:
        self._new_texts.append(chunk.text)
        self._output_ids.extend(chunk.token_ids)
        self._last = chunk
        if self._return_logprob:
            for logprob in chunk.logprobs:
                self._add_logprob(logprob)

    def _add_logprob(self, logprob: TokenLogprob) -> None:
        self._logprobs.append(self._entry(logprob.logprob, logprob.token_id))
        if self._with_top:
            self._top_logprobs.append([self._entry(value, token) for token, value in logprob.top])

    def _entry(self, logprob: float, token_id: int) -> list[Any]:
        return [logprob, token_id, self._token_text(token_id) if self._token_text else None]

    def to_dict(self) -> dict[str, Any]:
        return self._dict(0, 0, 0)

    def delta_dict(self) -> dict[str, Any]:
        result = self._dict(self._sent_chars, self._sent_ids, self._sent_logprobs)  # _text is whole now
        self._sent_chars, self._sent_ids = len(self._text), len(self._output_ids)
        self._sent_logprobs = len(self._logprobs)
        return result

    def _dict(self, first_char: int, first_id: int, first_logprob: int) -> dict[str, Any]:
        chunk = self._last
        assert chunk is not None, "a reply needs at least one chunk"
        self._text += "".join(self._new_texts)
        self._new_texts.clear()
        meta = meta_info(chunk, self._weight_version)
        if self._return_logprob:
            meta["output_token_logprobs"] = self._logprobs[first_logprob:]
            if self._with_top:
                meta["output_top_logprobs"] = self._top_logprobs[first_logprob:]
        reply: dict[str, Any] = {"text": self._text[first_char:], "output_ids": self._output_ids[first_id:], "meta_info": meta}
        if self._index is not None:
            reply["index"] = self._index
        return reply
