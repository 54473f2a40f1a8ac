"""Request bodies of Anthropic's routes. Plain data, parsed by msgspec; null means "not given".

Blocks, messages and tools stay dicts: `conversation` checks and translates them. What is done with all other fields stands in
`foreign_fields`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxserve.server.openai.protocol import Int32


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks before it answers, where its chat template lets one choose."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Int32 | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model must, may or must not call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text must match."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to answer."""

    effort: Literal["minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None


class ContextManagement(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to shorten the conversation."""

    edits: list[dict[str, Any]] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens: what shapes the prompt."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Int32
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    # Not Anthropic's, but what routers that know of replicas put into every body
    routed_dp_rank: Int32 | None = None
    data_parallel_rank: Int32 | None = None

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"
