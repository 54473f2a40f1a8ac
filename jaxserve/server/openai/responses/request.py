"""From a request of the Responses API to the chat route's: items to messages, tools to functions.

Neighbouring items of the assistant (its thinking, its text, its calls) are one message.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxserve.server.foreign_fields import not_supported
from jaxserve.server.http.body import shown
from jaxserve.server.openai.protocol import ChatCompletionRequest
from jaxserve.server.openai.responses.foreign_fields import (
    CALL,
    CALL_OUTPUT,
    INCLUDABLE,
    LOGPROBS,
    MESSAGE,
    NAMESPACE,
    REASONING,
    TEXT,
    TOOL,
)
from jaxserve.server.openai.responses.protocol import ResponsesRequest
from jaxserve.server.openai.system_messages import placed
from jaxserve.server.requests import RequestError

Item = dict[str, Any]
_Located = tuple[Item, str]  # and where it stands

_TEXT_PARTS = ("input_text", "output_text", "text")
_OF_ASSISTANT = ("reasoning", "function_call")


def new_items(body: ResponsesRequest) -> list[Item]:
    """A text is a message of the user."""
    return [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input


def num_pieces(items: list[Item], tools: list[Any] | None) -> int:
    contents = [item.get("content") for item in items]
    within = [tool.get("tools") for tool in tools or []]
    inner = sum(len(each) for each in (*contents, *within) if isinstance(each, list))
    return len(items) + len(tools or []) + inner


def chat_request(
    body: ResponsesRequest, kept: list[Item], takes_inline_system: Callable[[], bool], rid: str
) -> ChatCompletionRequest:
    """`kept` are the items of the conversation that the request goes on with. Raises RequestError."""
    _check(body)
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [*((item, "the kept conversation") for item in kept), *_located(new_items(body))]
    logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    return ChatCompletionRequest(
        model=body.model,
        messages=placed([*system, *_messages(items)], takes_inline_system),
        tools=[tool for tool, _ in functions_of(body)] or None,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        response_format=_response_format(body),
        logprobs=logprobs or None,
        top_logprobs=body.top_logprobs,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        stop=body.stop,
        priority=body.priority,
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        lora_path=body.lora_path,
        data_parallel_rank=body.data_parallel_rank,
        routed_dp_rank=body.routed_dp_rank,
        stream=body.stream,
        rid=rid,
    )


def _check(body: ResponsesRequest) -> None:
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        message = f"max_output_tokens must be at least 1, got {body.max_output_tokens}."
        raise RequestError(message, param="max_output_tokens")
    for value in body.include or ():
        if value not in INCLUDABLE:
            raise not_supported("include", f"may hold {' and '.join(INCLUDABLE)} here, got {shown(value)}")
    if body.truncation not in (None, "disabled"):
        raise not_supported("truncation", f"must be disabled, got {shown(body.truncation)}")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise not_supported("text.verbosity", f"must be medium, got {shown(body.text.verbosity)}")
    if body.background and body.stream:
        raise not_supported("background", "together with stream is not supported")
    if body.background and not body.is_kept:
        raise RequestError("background needs store: nobody could ask for the response.", param="background")


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    """The Chat API nests what the Responses API has flat."""
    form = body.text.format if body.text is not None else None
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def functions_of(body: ResponsesRequest) -> list[tuple[Item, str | None]]:
    """Each as a chat completion has it, with the namespace it is in."""
    functions: list[tuple[Item, str | None]] = []
    for i, tool in enumerate(body.tools or []):
        where, inner = f"tools[{i}]", tool.get("tools")
        if tool.get("type") != "namespace":
            functions.append((_tool(tool, where), None))
            continue
        NAMESPACE.check(tool, ("type", "name", "tools"), where)
        if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
            raise _wrong(f"{where}.tools", "a list of tools", inner)
        name = _string(tool, "name", where)
        functions += [(_tool(each, f"{where}.tools[{j}]"), name) for j, each in enumerate(inner)]
    names = Counter(str(function["function"].get("name")) for function, _ in functions)
    if twice := [name for name, count in names.items() if count > 1]:
        message = f"tools must have different names, also in different namespaces; {shown(twice[0])} comes twice."
        raise RequestError(message, param="tools")
    return functions


def _tool(tool: Item, where: str) -> Item:
    kind = tool.get("type")
    if kind != "function":
        raise not_supported("tools", f"may hold only functions; {where} has the type {shown(kind)}, which is not supported")
    function = {name: value for name, value in tool.items() if name in ("name", "description", "parameters", "strict")}
    TOOL.check(tool, ("type", *function), where)
    return {"type": "function", "function": function}


# --- items


def _located(items: list[Item]) -> Iterator[_Located]:
    if not items:
        raise RequestError("input must hold at least one item, got [].", param="input")
    return ((item, f"input[{i}]") for i, item in enumerate(items))


def _messages(items: Iterable[_Located]) -> Iterator[Item]:
    for of_assistant, group in itertools.groupby(items, _is_of_assistant):
        if of_assistant:
            yield _assistant(group)
        else:
            yield from itertools.starmap(_message, group)


def _is_of_assistant(located: _Located) -> bool:
    item, _ = located
    return item.get("type") in _OF_ASSISTANT or (_kind(item) == "message" and item.get("role") == "assistant")


def _kind(item: Item) -> Any:
    return item.get("type", "message" if "role" in item else None)


def _message(item: Item, where: str) -> Item:
    kind = _kind(item)
    if kind == "message":
        MESSAGE.check(item, ("type", "role", "content"), where)
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise _wrong(f"{where}.role", "one of user, assistant, system, developer", role)
        return {"role": role, "content": _text(item.get("content"), f"{where}.content")}
    if kind == "function_call_output":
        CALL_OUTPUT.check(item, ("type", "call_id", "output"), where)
        text = _text(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": text}
    raise not_supported("input", f"may hold messages, reasoning and function calls; {where} has the type {shown(kind)}")


def _assistant(items: Iterable[_Located]) -> Item:
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[Item] = []
    for item, where in items:
        if item.get("type") == "reasoning":
            REASONING.check(item, ("type", "content"), where)
            thoughts.append(_text(item.get("content") or "", f"{where}.content", ("reasoning_text",)))
        elif item.get("type") == "function_call":
            CALL.check(item, ("type", "call_id", "name", "arguments"), where)
            function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
            calls.append({"id": _string(item, "call_id", where), "type": "function", "function": function})
        else:
            MESSAGE.check(item, ("type", "role", "content"), where)
            texts.append(_text(item.get("content"), f"{where}.content", (*_TEXT_PARTS, "refusal")))
    message: Item = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: Any, where: str, kinds: tuple[str, ...] = _TEXT_PARTS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "a string or a list of content parts", content)
    return "\n".join(_part(part, f"{where}[{i}]", kinds) for i, part in enumerate(content))


def _part(part: Any, where: str, kinds: tuple[str, ...]) -> str:
    if not isinstance(part, dict):
        raise _wrong(where, "an object", part)
    kind = part.get("type")
    if kind not in kinds:
        raise not_supported("input", f"may hold only text; {where} has the type {shown(kind)}, which is not supported")
    name = "refusal" if kind == "refusal" else "text"
    TEXT.check(part, ("type", name), where)
    return _string(part, name, where)


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", "a string", value)
    return value


def _wrong(where: str, rule: str, value: Any) -> RequestError:
    return RequestError(f"{where} must be {rule}, got {shown(value)}.", param=where.partition("[")[0].partition(".")[0])
