"""Formats in which models think before they answer; REASONING_FORMATS has them by the names that SGLang gave them."""

from __future__ import annotations

from jaxserve.parsers.base import ReasoningFormat
from jaxserve.parsers.reasoning.gpt_oss import GptOssReasoning
from jaxserve.parsers.reasoning.tagged import TaggedFormat

_THINK = TaggedFormat("<think>", "</think>")
_ALWAYS = TaggedFormat("<think>", "</think>", always=True)
_UNTIL_A_CALL = TaggedFormat("<think>", "</think>", call_tag="<tool_call>")

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek-r1": _ALWAYS,
    "deepseek-v3": _THINK,
    "deepseek-v4": _THINK,
    "gemma4": TaggedFormat("<|channel>thought\n", "<channel|>", keeps_special_tokens=True),
    "glm45": _UNTIL_A_CALL,
    "gpt-oss": GptOssReasoning(),
    "interns1": _UNTIL_A_CALL,
    "kimi": TaggedFormat("◁think▷", "◁/think▷"),
    "kimi_k2": TaggedFormat("<think>", "</think>", call_tag="<|tool_calls_section_begin|>"),
    "mimo": _UNTIL_A_CALL,
    "minimax": _ALWAYS,
    "minimax-m3": TaggedFormat("<mm:think>", "</mm:think>"),
    "mistral": TaggedFormat("[THINK]", "[/THINK]", keeps_special_tokens=True),
    "nano_v3": _UNTIL_A_CALL,
    "nemotron_3": _UNTIL_A_CALL,
    "poolside_v1": _UNTIL_A_CALL,
    "qwen3": _UNTIL_A_CALL,
    "qwen3-thinking": TaggedFormat("<think>", "</think>", call_tag="<tool_call>", always=True),
    "step3": _ALWAYS,
    "step3p5": _ALWAYS,
}
