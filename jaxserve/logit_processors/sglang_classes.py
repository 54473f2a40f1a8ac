"""SGLang's own processors, for code that derives from them: the worker gives these in place of SGLang's module.

A class derives from one to say which tokens its model's thinking begins and ends with; whoever wants them as they are names
them and needs no code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.logit_processors.base import CustomLogitProcessor
from jaxserve.logit_processors.masks import repeating_tokens

__all__ = [
    "CustomLogitProcessor",
    "DeepSeekR1ThinkingBudgetLogitProcessor",
    "DeepseekOCRNoRepeatNGramLogitProcessor",
    "DisallowedTokensLogitsProcessor",
    "Glm4MoeThinkingBudgetLogitProcessor",
    "InklingThinkingBudgetLogitProcessor",
    "Qwen3ThinkingBudgetLogitProcessor",
    "ThinkingBudgetLogitProcessor",
]


class DisallowedTokensLogitsProcessor(CustomLogitProcessor):
    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        for line, params in zip(logits, custom_param_list, strict=True):
            line[params["token_ids"]] = -np.inf
        return logits


class ThinkingBudgetLogitProcessor(CustomLogitProcessor):
    """Counts the tokens since thinking was begun and not ended, in the prompt or the outputs."""

    THINKING_START_TOKEN_ID: int
    THINKING_END_TOKEN_ID: int
    NEW_LINE_TOKEN_ID: int

    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        for line, params in zip(logits, custom_param_list, strict=True):
            budget = params.get("thinking_budget")
            if not isinstance(budget, int) or budget < 0:
                continue
            outputs = params["__req__"].output_ids
            ids = np.asarray(params["__req__"].origin_input_ids + outputs)
            begun = np.flatnonzero(ids == self.THINKING_START_TOKEN_ID)
            ended = np.flatnonzero(ids == self.THINKING_END_TOKEN_ID)
            if not len(begun) or (len(ended) and ended[-1] > begun[-1]) or len(ids) - begun[-1] - 1 < budget:
                continue
            is_behind_newline = bool(outputs) and outputs[-1] == self.NEW_LINE_TOKEN_ID
            line[:] = -np.inf
            line[self.THINKING_END_TOKEN_ID if is_behind_newline else self.NEW_LINE_TOKEN_ID] = 0.0
        return logits


class Glm4MoeThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    THINKING_START_TOKEN_ID = 151350
    THINKING_END_TOKEN_ID = 151351
    NEW_LINE_TOKEN_ID = 198


class Qwen3ThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    THINKING_START_TOKEN_ID = 151667
    THINKING_END_TOKEN_ID = 151668
    NEW_LINE_TOKEN_ID = 198


class DeepSeekR1ThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    THINKING_START_TOKEN_ID = 128798
    THINKING_END_TOKEN_ID = 128799
    NEW_LINE_TOKEN_ID = 201


class InklingThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    THINKING_START_TOKEN_ID = 200008
    THINKING_END_TOKEN_ID = 200010
    NEW_LINE_TOKEN_ID = 198


class DeepseekOCRNoRepeatNGramLogitProcessor(CustomLogitProcessor):
    def __call__(self, logits: np.ndarray, custom_param_list: list[dict[str, Any]]) -> np.ndarray:
        for line, params in zip(logits, custom_param_list, strict=True):
            size, window = int(params.get("ngram_size") or 0), int(params.get("window_size") or 0)
            if size <= 0 or window <= 0:
                continue
            ids = np.asarray(params["__req__"].origin_input_ids + params["__req__"].output_ids)
            allowed = list(params.get("whitelist_token_ids") or [])
            line[np.setdiff1d(repeating_tokens(ids, size, window), allowed).astype(int)] = -np.inf
        return logits
