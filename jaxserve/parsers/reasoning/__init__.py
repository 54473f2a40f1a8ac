"""Formats in which models think before they answer; REASONING_FORMATS has them by the names that SGLang gave them."""

from __future__ import annotations

from jaxserve.parsers.base import ReasoningFormat
from jaxserve.parsers.reasoning.tagged import TaggedFormat

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "qwen3": TaggedFormat("<think>", "</think>", call_tag="<tool_call>"),
    "qwen3-thinking": TaggedFormat("<think>", "</think>", call_tag="<tool_call>", always=True),
    "deepseek-r1": TaggedFormat("<think>", "</think>", always=True),
    "deepseek-v3": TaggedFormat("<think>", "</think>"),
}
