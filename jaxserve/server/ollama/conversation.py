"""From Ollama's requests to the chat route's. Checks each message, so that an error names the caller's own field."""

from __future__ import annotations

from typing import Any

from jaxserve.config import ServerArgs
from jaxserve.server.foreign_fields import not_supported
from jaxserve.server.http.body import shown
from jaxserve.server.ollama.foreign_fields import CALL, MESSAGE, OPTIONS_OFF
from jaxserve.server.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions, OllamaRequest
from jaxserve.server.openai.protocol import ChatCompletionRequest, OpenAIRequest
from jaxserve.server.requests import RequestError

_DEFAULT_TAG = ":latest"
_Message = dict[str, Any]


def served_name(name: str, args: ServerArgs) -> str:
    """Ollama's clients may add a tag, or leave it out. What is not the model's name may be an adapter's."""
    served, bare = args.effective_served_model_name, name.removesuffix(_DEFAULT_TAG)
    return served if bare == served.removesuffix(_DEFAULT_TAG) else bare


def chat_request(body: OllamaChatRequest, args: ServerArgs) -> ChatCompletionRequest:
    placed = [(message, f"messages[{i}]") for i, message in enumerate(body.messages or [])]
    return _chat(body, args, [_message(message, where) for message, where in placed], body.tools)


def num_pieces(body: OllamaChatRequest) -> int:
    """Messages, calls and tools: what there is to check and translate."""
    messages = body.messages or []
    calls = [message.get("tool_calls") for message in messages]
    return len(messages) + sum(len(each) for each in calls if isinstance(each, list)) + len(body.tools or [])


def prompt_request(body: OllamaGenerateRequest, args: ServerArgs) -> ChatCompletionRequest:
    """A prompt that is not raw is a conversation of one message."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    return _chat(body, args, [*system, {"role": "user", "content": body.prompt or ""}], None)


def raw_request(body: OllamaGenerateRequest) -> OpenAIRequest:
    """What shapes the answer to a raw prompt."""
    if body.system:
        raise RequestError("system needs a template: it cannot go with raw.", param="system")
    request = OpenAIRequest()
    _set_common(request, body)
    return request


def _chat(
    body: OllamaRequest, args: ServerArgs, messages: list[_Message], tools: list[dict[str, Any]] | None
) -> ChatCompletionRequest:
    request = ChatCompletionRequest(
        model=served_name(body.model, args),
        messages=messages,
        tools=tools or None,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
    )
    _set_common(request, body)
    if isinstance(body.think, str):
        request.reasoning_effort = body.think
    elif body.think is not None:
        request.thinking = {"type": "enabled" if body.think else "disabled"}
    return request


def _set_common(request: OpenAIRequest, body: OllamaRequest) -> None:
    if body.format not in (None, ""):
        request.response_format = _response_format(body.format)
    options = body.options
    if options is None:
        return
    _check_off(options)
    request.temperature, request.top_p, request.min_p = options.temperature, options.top_p, options.min_p
    request.top_k = -1 if options.top_k == 0 else options.top_k
    request.seed, request.stop = options.seed, options.stop
    request.repetition_penalty = options.repeat_penalty
    request.presence_penalty, request.frequency_penalty = options.presence_penalty, options.frequency_penalty


def _response_format(form: Any) -> dict[str, Any]:
    if form == "json":
        return {"type": "json_object"}
    if not isinstance(form, dict):
        raise RequestError(f'format must be "json" or a JSON schema, got {shown(form)}.', param="format")
    return {"type": "json_schema", "json_schema": {"schema": form}}


def _check_off(options: OllamaOptions) -> None:
    for name, values in OPTIONS_OFF.items():
        if getattr(options, name) not in (None, *values):
            raise not_supported(f"options.{name}")


def _message(message: dict[str, Any], where: str) -> _Message:
    MESSAGE.check(message, ("role", "content", "thinking", "tool_calls", "tool_name", "tool_call_id"), where)
    result: _Message = {"role": message.get("role"), "content": _text(message, "content", where)}
    if thinking := _text(message, "thinking", where):
        result["reasoning_content"] = thinking
    for name, ours in (("tool_name", "name"), ("tool_call_id", "tool_call_id")):
        if value := _text(message, name, where):
            result[ours] = value
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise _wrong(f"{where}.tool_calls", "a list", calls)
    if calls:
        result["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return result


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise _wrong(where, "an object with a function", call)
    CALL.check(call, ("id", "function"), where)
    function = call["function"]
    if not isinstance(function.get("name"), str):
        raise _wrong(f"{where}.function.name", "a string", function.get("name"))
    arguments = function.get("arguments")
    if not isinstance(arguments, dict | None):
        raise _wrong(f"{where}.function.arguments", "an object", arguments)
    result = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return {"id": _text(call, "id", where), **result} if call.get("id") else result


def _text(fields: dict[str, Any], name: str, where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str | None):
        raise _wrong(f"{where}.{name}", "a string", value)
    return value or ""


def _wrong(where: str, rule: str, value: Any) -> RequestError:
    param = where.partition("[")[0].partition(".")[0]
    return RequestError(f"{where} must be {rule}, got {shown(value)}.", param=param)
