"""From OpenAI chat messages to what a chat template takes: dicts with a role and a text.

Checks every message, joins text parts, and refuses parts no text model reads. Which words surround a message is the
template's business, not ours.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.server.foreign_fields import not_supported
from jaxserve.server.http.body import shown
from jaxserve.server.openai.foreign_fields import MESSAGE, TEXT_PART
from jaxserve.server.requests import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# What a template may read next to role and content.
_PASSED_ON = ("name", "tool_call_id", "reasoning_content")
_FIELDS = ("role", "content", "tool_calls", *_PASSED_ON)


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise RequestError("messages must hold at least one message, got [].", param="messages")
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    MESSAGE.check(message, _FIELDS, where)
    role = message.get("role")
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise _wrong(f"{where}.role", f"one of {', '.join(ROLES)}", role)
    role = role.lower()
    content = message.get("content")
    if content is None and role != "assistant":
        raise RequestError(f"{where}.content is required for the role {role}.", param="messages")
    # Most templates know no developer role and some drop it silently; those that know it treat system alike.
    result: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": _text(content, where)}
    result.update({name: message[name] for name in _PASSED_ON if message.get(name) is not None})
    if message.get("tool_calls"):
        result["tool_calls"] = _tool_calls(message["tool_calls"], where)
    return result


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(f"{where}.content", "a string or a list of content parts", content)
    return " ".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise _wrong(where, "an object", part)
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise _wrong(f"{where}.text", "a string", part.get("text"))
        TEXT_PART.check(part, ("type", "text"), where)
        return str(part["text"])
    if not isinstance(kind, str):
        raise _wrong(f"{where}.type", "a string", kind)
    raise not_supported("messages", f"may hold only text parts; {where} has the type {shown(kind)}, which is not supported yet")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Templates iterate over arguments as an object; clients send them as JSON text."""
    if not isinstance(calls, list):
        raise _wrong(f"{where}.tool_calls", "a list", calls)
    parsed = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(f"{where}.tool_calls[{i}].function", "an object with a name", function)
        parsed.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return parsed


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = msgspec.json.decode(arguments)  # not Python's, which lets halves of surrogate pairs pass
    except (msgspec.DecodeError, ValueError, RecursionError):
        return arguments  # a model's own broken call, handed back as history
    return value if isinstance(value, dict) else arguments


def _wrong(where: str, rule: str, value: Any) -> RequestError:
    param = where.partition("[")[0].partition(".")[0]
    return RequestError(f"{where} must be {rule}, got {shown(value)}.", param=param)
