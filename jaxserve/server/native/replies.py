"""GenerationChunks of one sequence, put together into SGLang's reply object.

Used by /generate and by the Engine, streaming or not:

    {"text", "output_ids", "meta_info": {"id", "finish_reason", "prompt_tokens", ...}}

`to_dict` gives everything so far (what SGLang streams by default), `delta_dict` what came since it was last called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.messages import HiddenStates
from jaxserve.server.native.logprobs import LogprobColumns, Pack, TokenText
from jaxserve.server.requests import GenerationChunk, PromptOptions
from jaxserve.server.routed_experts import packed_experts
from jaxserve.server.thinking_tokens import ThinkingTokens
from jaxserve.server.token_logprobs import logprobs_of_prompt

Reply = dict[str, Any]


def meta_info(chunk: GenerationChunk, weight_version: str) -> dict[str, Any]:
    """What a reply says about a sequence after this chunk. `weight_version` is that of requests that no weights computed."""
    return {
        "id": chunk.rid,
        "finish_reason": chunk.finish_reason.to_dict() if chunk.finish_reason else None,
        "prompt_tokens": chunk.prompt_tokens,
        "completion_tokens": chunk.completion_tokens,
        "cached_tokens": chunk.cached_tokens,
        "cached_tokens_details": {"device": chunk.cached_tokens, "host": 0},
        "reasoning_tokens": 0,
        "weight_version": chunk.weight_version or weight_version,
        **chunk.meta,
    }


class GenerateReply:
    """One sequence's reply. `index` is its place in a list reply, None for a single one."""

    def __init__(
        self,
        options: PromptOptions,
        *,
        weight_version: str = "default",
        token_text: TokenText | None = None,
        prompt_ids: list[int] | None = None,
        index: int | None = None,
        pack: Pack | None = None,
        thinking: ThinkingTokens | None = None,
    ) -> None:
        """`weight_version` is that of requests that no weights computed; `token_text` is given if logprobs are to come with the
        tokens' text, `prompt_ids` if they are to be shown, `pack` if long lists are not kept as they are, `thinking` if the
        output begins with it."""
        self._options = options
        self._weight_version = weight_version
        self._prompt_ids = prompt_ids
        self._index = index
        self._text = ""
        self._new_texts: list[str] = []  # not yet part of _text
        self._output_ids: list[int] = []
        self._pack: Pack = list if pack is None else pack
        self._input_logprobs = LogprobColumns(options, token_text, pack)
        self._logprobs = LogprobColumns(options, token_text, pack)
        self._thinking = thinking
        self._hidden_states: list[HiddenStates] = []  # as they came
        self._experts: list[np.ndarray] = []  # likewise
        self._last: GenerationChunk | None = None
        self._sent_chars = self._sent_ids = self._sent_inputs = self._sent_logprobs = 0

    @property
    def is_finished(self) -> bool:
        return self._last is not None and self._last.finish_reason is not None

    def add(self, chunk: GenerationChunk) -> None:
        self._new_texts.append(chunk.text)
        self._output_ids.extend(chunk.token_ids)
        self._last = chunk
        if self._thinking is not None:
            self._thinking.add(chunk.token_ids)
        if self._options.return_logprob:
            self._input_logprobs.extend(logprobs_of_prompt(chunk.input_logprobs))
            self._logprobs.extend(chunk.logprobs)
        self._hidden_states.extend(chunk.hidden_states)
        self._experts.extend(chunk.experts)

    def to_dict(self) -> dict[str, Any]:
        return self._dict(0, 0, 0, 0)

    def delta_dict(self) -> dict[str, Any]:
        result = self._dict(self._sent_chars, self._sent_ids, self._sent_inputs, self._sent_logprobs)  # _text is whole now
        self._sent_chars, self._sent_ids = len(self._text), len(self._output_ids)
        self._sent_inputs, self._sent_logprobs = len(self._input_logprobs), len(self._logprobs)
        return result

    def _dict(self, first_char: int, first_id: int, first_input: int, first_logprob: int) -> dict[str, Any]:
        chunk = self._last
        assert chunk is not None, "a reply needs at least one chunk"
        self._text += "".join(self._new_texts)
        self._new_texts.clear()
        meta = meta_info(chunk, self._weight_version)
        if self._thinking is not None:
            meta["reasoning_tokens"] = self._thinking.count
        if self._options.return_logprob:
            meta |= self._input_logprobs.fields("input", first_input)
            meta |= self._logprobs.fields("output", first_logprob)
            meta["output_token_logprobs_length"] = len(self._logprobs)
        if self._hidden_states and self.is_finished:
            only_last = self._options.return_hidden_states == "last"
            meta["hidden_states"] = shaped_hidden_states(self._hidden_states, self._pack, only_last=only_last)
        if self._experts and self.is_finished:
            meta["routed_experts"] = packed_experts(self._experts)
        reply: dict[str, Any] = {"text": self._text[first_char:], "output_ids": self._output_ids[first_id:], "meta_info": meta}
        if self._prompt_ids is not None:
            reply["prompt_token_ids"] = self._prompt_ids
        if self._index is not None:
            reply["index"] = self._index
        return reply


def shaped_hidden_states(parts: Sequence[HiddenStates], pack: Pack, *, only_last: bool) -> Any:
    """SGLang's: a list for the prompt with one vector for each of its tokens, then a vector for each output but the last; or
    the last vector itself."""
    prompt = [vector for part in parts if part.prompt is not None for vector in part.prompt]
    outputs = [vector for part in parts if part.outputs is not None for vector in part.outputs]
    if only_last:
        return pack([*prompt, *outputs][-1].tolist())
    return [[pack(vector.tolist()) for vector in prompt], *(pack(vector.tolist()) for vector in outputs)]
