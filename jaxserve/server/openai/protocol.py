"""Request bodies of the OpenAI routes: OpenAI's fields, then SGLang's extensions.

Plain data, parsed by msgspec. Null means "not given" everywhere. A field nobody knows is ignored, as OpenAI and SGLang do; a
field that is known but not served yet is declared here as such, so that `refuse_unsupported` can answer 400 instead of
pretending.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from jaxserve.server.http.errors import not_supported

# What crosses to the scheduler must fit its messages: 64 bits, and 32 where it fills an array.
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _UnsupportedFields(msgspec.Struct, kw_only=True):
    """Known fields that are refused unless they hold a value that asks for nothing."""

    response_format: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    lora_path: Any = None
    session_id: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    custom_params: Any = None
    watermark: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    return_sampling_mask: Any = None
    return_cached_tokens_details: Any = None
    return_spec_tokens_details: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None


class OpenAIRequest(_UnsupportedFields, kw_only=True):
    """What completions and chat completions share."""

    UNSUPPORTED: ClassVar[tuple[str, ...]] = ()

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
    user: str | None = None
    # SGLang's extensions
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
    priority: Int32 | None = None
    return_token_ids: bool | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n


class CompletionRequest(OpenAIRequest, kw_only=True):
    """POST /v1/completions."""

    UNSUPPORTED: ClassVar[tuple[str, ...]] = (*_UnsupportedFields.__struct_fields__, "suffix")

    prompt: str | list[str | Int32 | list[Int32]]
    best_of: Int32 | None = None
    echo: bool | None = None
    logprobs: Int32 | None = None
    suffix: Any = None


class ChatCompletionRequest(OpenAIRequest, kw_only=True):
    """POST /v1/chat/completions. Messages stay dicts: the chat template reads them."""

    UNSUPPORTED: ClassVar[tuple[str, ...]] = (
        *_UnsupportedFields.__struct_fields__,
        "functions", "function_call", "audio", "prediction", "web_search_options", "chat_template", "task",
    )  # fmt: skip

    messages: list[dict[str, Any]]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | float | None = None
    # SGLang's extensions
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    input_ids: list[Int32] | None = None
    return_prompt_token_ids: bool | None = None
    return_meta_info: bool | None = None
    # Refused
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    task: Any = None


def refuse_unsupported(request: OpenAIRequest) -> None:
    """Raises RequestError for the first known field that asks for something this version does not do."""
    for field in request.UNSUPPORTED:
        value = getattr(request, field)
        if not value:  # null, false, 0, "", [] and {} ask for nothing
            continue
        if field == "response_format" and isinstance(value, dict) and value.get("type") == "text":
            continue
        if field == "function_call" and value == "none":
            continue
        raise not_supported(field)
