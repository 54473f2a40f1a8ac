"""Request bodies of the OpenAI routes: OpenAI's fields, then SGLang's extensions.

Plain data, parsed by msgspec. Null means "not given" everywhere. What is done with all other fields stands in
`jaxserve.server.openai.foreign_fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from jaxserve.server.requests import SessionParams

# What crosses to the scheduler must fit its messages: 64 bits, and 32 where it fills an array.
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # refused if true


class OpenAIRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions share."""

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: Int32 | None = None
    n: Int32 | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    response_format: dict[str, Any] | None = None  # chat's; SGLang's completions take it, too
    # SGLang's extensions
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    min_tokens: Int32 | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[Int32] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    rid: str | list[str] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_path: str | list[str | None] | None = None  # a list has one entry per prompt
    custom_labels: dict[str, str] | None = None
    priority: Int32 | None = None
    routed_dp_rank: Int32 | None = None
    data_parallel_rank: Int32 | None = None  # its older name
    custom_logit_processor: str | None = None
    custom_params: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_cached_tokens_details: bool | None = None
    return_hidden_states: bool | Literal["last"] | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Int32 | None = None
    session_params: SessionParams | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def num_samples(self) -> int:
        """Of each prompt, of which so many are chosen."""
        return self.num_choices


class CompletionRequest(OpenAIRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | Int32 | list[Int32]]
    best_of: Int32 | None = None
    echo: bool | None = None
    logprobs: Int32 | None = None
    suffix: str | None = None

    @property
    def num_samples(self) -> int:
        return self.num_choices if self.best_of is None else self.best_of


class ChatCompletionRequest(OpenAIRequest, kw_only=True):
    """POST /v1/chat/completions. Messages stay dicts: the chat template reads them."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | float | None = None
    # SGLang's extensions
    reasoning: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None  # other servers' word for the same
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    input_ids: list[Int32] | None = None
    return_prompt_token_ids: bool | None = None
    return_meta_info: bool | None = None
