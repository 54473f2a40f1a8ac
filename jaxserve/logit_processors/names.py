"""The processors that have a name, and what the parameters of each must be.

A request names one, or brings code. SGLang's clients bring code also for the classes that SGLang has itself: a pickle that only
refers to such a class is its name, and nothing is run to see that.
"""

from __future__ import annotations

import functools
import json
import math
import pickletools
from collections.abc import Mapping
from typing import Any

from jaxserve.types import NoRepeatNgram

THINKING_BUDGET = "thinking_budget"
DISALLOWED_TOKENS = "disallowed_tokens"
NO_REPEAT_NGRAM = "no_repeat_ngram"
PROCESSOR_NAMES = (THINKING_BUDGET, DISALLOWED_TOKENS, NO_REPEAT_NGRAM)

SGLANG_MODULE = "sglang.srt.sampling.custom_logit_processor"
_SGLANG_CLASSES = {
    "DisallowedTokensLogitsProcessor": DISALLOWED_TOKENS,
    "DeepseekOCRNoRepeatNGramLogitProcessor": NO_REPEAT_NGRAM,
    "ThinkingBudgetLogitProcessor": THINKING_BUDGET,
    "Glm4MoeThinkingBudgetLogitProcessor": THINKING_BUDGET,
    "Qwen3ThinkingBudgetLogitProcessor": THINKING_BUDGET,
    "DeepSeekR1ThinkingBudgetLogitProcessor": THINKING_BUDGET,
    "InklingThinkingBudgetLogitProcessor": THINKING_BUDGET,
}

MOST_NGRAM = 1 << 20
MOST_WHITELISTED = 4096
MOST_CODE_CHARS = 4 << 20
MOST_PARAMS_BYTES = 1 << 20


def name_of(processor: str) -> str | None:
    """Which named processor a request's custom_logit_processor is; None: none, it is code. ValueError if it is nothing."""
    text = processor.strip()
    if not is_code(text):
        name = _SGLANG_CLASSES.get(text, text)
        if name not in PROCESSOR_NAMES:
            raise ValueError(
                f"custom_logit_processor has no processor {_shown(text)}; there are {', '.join(PROCESSOR_NAMES)}, and code as "
                "CustomLogitProcessor.to_str() writes it."
            )
        return name
    return _class_named_in(user_code(text))


def is_code(processor: str) -> bool:
    return processor.lstrip().startswith("{")


@functools.lru_cache(maxsize=16)
def user_code(processor: str) -> bytes:
    """The pickle in what `CustomLogitProcessor.to_str` wrote; it is not looked into. ValueError if there is none."""
    if len(processor) > MOST_CODE_CHARS:
        raise ValueError(f"custom_logit_processor may have at most {MOST_CODE_CHARS} characters, got {len(processor)}.")
    try:
        found = json.loads(processor)["callable"]
        return bytes.fromhex(found)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(
            'custom_logit_processor must be a name, or JSON of the form {"callable": "..."} with a pickle in hexadecimals, as '
            "CustomLogitProcessor.to_str() writes it."
        ) from None


def _class_named_in(code: bytes) -> str | None:
    """Of SGLang's, if the pickle is nothing but a reference to it. Reads the pickle's operations; runs none."""
    words: list[Any] = []
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(code)):
            if count > 16:
                return None
            if operation.name in ("SHORT_BINUNICODE", "BINUNICODE", "GLOBAL"):
                words += str(argument).split(" ")
            elif operation.name not in ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "PUT", "STACK_GLOBAL", "STOP"):
                return None
    except Exception:  # whatever it says of bytes that are no pickle
        return None
    return _SGLANG_CLASSES.get(words[1]) if len(words) == 2 and words[0] == SGLANG_MODULE else None


# --- parameters, as fields of custom_params


def thinking_tokens(params: Mapping[str, Any]) -> int:
    _check_names(params, THINKING_BUDGET, ("thinking_budget",))
    return _integer(params, "thinking_budget", 0, 2**31 - 1)


def disallowed_tokens(params: Mapping[str, Any], most: int, vocab_size: int) -> dict[int, float]:
    """As a logit_bias."""
    _check_names(params, DISALLOWED_TOKENS, ("token_ids",))
    return dict.fromkeys(_token_ids(params, "token_ids", most, vocab_size), -math.inf)


def no_repeat_ngram(params: Mapping[str, Any], vocab_size: int) -> NoRepeatNgram:
    _check_names(params, NO_REPEAT_NGRAM, ("ngram_size", "window_size", "whitelist_token_ids"))
    whitelist: list[int] = []
    if params.get("whitelist_token_ids") is not None:
        whitelist = _token_ids(params, "whitelist_token_ids", MOST_WHITELISTED, vocab_size)
    size, window = (_integer(params, name, 1, MOST_NGRAM) for name in ("ngram_size", "window_size"))
    return NoRepeatNgram(size, window, whitelist)


def params_as_json(params: Mapping[str, Any]) -> bytes:
    """For code of users' own."""
    try:
        data = json.dumps(params, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:  # an Engine's caller may pass anything
        raise ValueError(f"custom_params must be JSON: {error}.") from None
    if len(data) > MOST_PARAMS_BYTES:
        raise ValueError(f"custom_params may have at most {MOST_PARAMS_BYTES} bytes, got {len(data)}.")
    return data


def _check_names(params: Mapping[str, Any], processor: str, known: tuple[str, ...]) -> None:
    for name in params:
        if name not in known:
            raise ValueError(f"custom_params has no field {_shown(name)} for {processor}, which knows {', '.join(known)}.")


def _integer(params: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = params.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"custom_params.{name} must be an integer in [{least}, {most}], got {_shown(value)}.")
    return value


def _token_ids(params: Mapping[str, Any], name: str, most: int, vocab_size: int) -> list[int]:
    value = params.get(name)
    if not isinstance(value, list | tuple):
        raise ValueError(f"custom_params.{name} must be a list of token ids, got {_shown(value)}.")
    if len(value) > most:
        raise ValueError(f"custom_params.{name} may hold at most {most} tokens, got {len(value)}.")
    for token_id in value:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ValueError(f"custom_params.{name} must hold token ids in [0, {vocab_size}), got {_shown(token_id)}.")
    return list(value)


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
