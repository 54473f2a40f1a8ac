"""Request bodies of /v1/responses. Plain data, parsed by msgspec; null means "not given".

Items, tools and formats stay dicts: `request` checks and translates them. What is done with all other fields stands in
`foreign_fields`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.server.openai.protocol import Int32


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How hard to think."""

    effort: str | float | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text must match."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    max_output_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Int32 | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    # SGLang's extensions
    top_k: Int32 | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    priority: Int32 | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_path: str | None = None
    data_parallel_rank: Int32 | None = None
    routed_dp_rank: Int32 | None = None

    @property
    def is_kept(self) -> bool:
        return self.store is not False
