"""From Anthropic's request to the chat route's: blocks to messages, tools to functions.

    messages of blocks -> turns (neighbours of one role are one) -> messages of role, content, reasoning_content, tool_calls

A tool's result is a message of its own, of the role tool. Checks each block, so that an error names the caller's own field.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxserve.server.anthropic.foreign_fields import (
    EDITS_WITHOUT_EFFECT,
    MESSAGE,
    REDACTED_THINKING,
    SEARCH_RESULT,
    TEXT,
    THINKING,
    TOOL,
    TOOL_REFERENCE,
    TOOL_RESULT,
    TOOL_USE,
)
from jaxserve.server.anthropic.protocol import ContextManagement, CountTokensRequest, MessagesRequest, ToolChoice
from jaxserve.server.foreign_fields import not_supported
from jaxserve.server.http.body import shown
from jaxserve.server.openai.protocol import ChatCompletionRequest
from jaxserve.server.openai.system_messages import placed
from jaxserve.server.requests import RequestError

# Claude Code begins its system prompt with a line that says whom to bill and differs from request to request: no two
# conversations, and no two turns of one, would share a prefix.
_BILLING_PREFIX = "x-anthropic-billing-header:"

Block = tuple[dict[str, Any], str]  # and where it stands
_Message = dict[str, Any]


def chat_request(
    body: CountTokensRequest, takes_inline_system: Callable[[], bool], rid: str | None = None
) -> ChatCompletionRequest:
    """Raises RequestError. How many tokens to generate is not part of it."""
    _check_edits(body.context_management)
    messages = placed([_system(body.system), *_messages(body.messages)], takes_inline_system)
    config, thinking, choice = body.output_config, body.thinking, body.tool_choice
    effort = config.effort if config is not None else None
    chat = ChatCompletionRequest(
        model=body.model,
        messages=messages,
        # The reply goes on with an answer that the request has begun.
        continue_final_message=messages[-1]["role"] == "assistant" or None,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)] if body.tools else None,
        tool_choice=_tool_choice(choice),
        # Not as reasoning_effort, which would turn thinking on.
        chat_template_kwargs=None if effort is None else {"reasoning_effort": effort},
        rid=rid,
    )
    if thinking is not None:
        chat.thinking = {"type": "disabled" if thinking.type == "disabled" else "enabled"}
    if choice is not None and choice.disable_parallel_tool_use is not None:
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    if config is not None and config.format is not None:
        chat.response_format = {"type": "json_schema", "json_schema": {"schema": config.format.schema, "strict": True}}
    if isinstance(body, MessagesRequest):
        chat.stream = body.stream
        chat.stop = body.stop_sequences
        chat.temperature, chat.top_k, chat.top_p = body.temperature, body.top_k, body.top_p
        chat.routed_dp_rank, chat.data_parallel_rank = body.routed_dp_rank, body.data_parallel_rank
    return chat


def _check_edits(management: ContextManagement | None) -> None:
    for i, edit in enumerate((management.edits if management is not None else None) or []):
        kind = edit.get("type")
        if not isinstance(kind, str) or not kind.startswith(EDITS_WITHOUT_EFFECT):
            raise not_supported("context_management", f"is not supported with edits[{i}] of the type {shown(kind)}")


def num_pieces(body: CountTokensRequest) -> int:
    """Messages, blocks and tools: what there is to check and translate."""
    contents = [message.get("content") for message in body.messages]
    blocks = [block for content in (*contents, body.system) if isinstance(content, list) for block in content]
    within = [block.get("content") for block in blocks if isinstance(block, dict)]
    return len(contents) + len(blocks) + sum(len(inner) for inner in within if isinstance(inner, list)) + len(body.tools or [])


# --- messages


def _messages(messages: list[dict[str, Any]]) -> Iterator[_Message]:
    if not messages:
        raise RequestError("messages must hold at least one message, got [].", param="messages")
    given = [(_checked_role(message, f"messages[{i}]"), message, f"messages[{i}]") for i, message in enumerate(messages)]
    for role, group in itertools.groupby(given, lambda entry: entry[0]):
        blocks = (block for _, message, where in group for block in _blocks(message["content"], f"{where}.content"))
        if role == "assistant":
            yield _assistant(blocks)
        else:
            yield from _user(role, blocks)


def _system(system: str | list[dict[str, Any]] | None) -> _Message:
    texts = (_text(block, where, ("text",)) for block, where in _blocks(system or [], "system"))
    lines = (text.partition("\n")[2] if text.startswith(_BILLING_PREFIX) else text for text in texts)
    return {"role": "system", "content": "\n".join(filter(None, lines))}


def _checked_role(message: dict[str, Any], where: str) -> str:
    MESSAGE.check(message, ("role", "content"), where)
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise _wrong(f"{where}.role", "one of user, assistant, system", role)
    if message.get("content") is None:
        raise RequestError(f"{where}.content is required.", param="messages")
    return str(role)


def _blocks(content: Any, where: str) -> Iterator[Block]:
    """A text is one block."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, where
        return
    if not isinstance(content, list):
        raise _wrong(where, "a string or a list of blocks", content)
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            raise _wrong(f"{where}[{i}]", "an object", block)
        yield block, f"{where}[{i}]"


def _user(role: str, blocks: Iterable[Block]) -> Iterator[_Message]:
    """Also of the role system."""
    texts: list[str] = []
    is_empty = True
    for block, where in blocks:
        is_empty = False
        if role == "user" and block.get("type") == "tool_result":
            if texts:
                yield {"role": role, "content": "\n".join(texts)}
                texts = []
            yield _tool_result(block, where)
        else:
            texts.append(_text(block, where, ("text", "search_result") if role == "user" else ("text",)))
    if texts or is_empty:
        yield {"role": role, "content": "\n".join(texts)}


def _tool_result(block: dict[str, Any], where: str) -> _Message:
    TOOL_RESULT.check(block, ("type", "tool_use_id", "content"), where)
    content = block.get("content")
    inner = _blocks("" if content is None else content, f"{where}.content")
    text = "\n".join(_text(part, at, ("text", "search_result", "tool_reference")) for part, at in inner)
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": text}


def _assistant(blocks: Iterable[Block]) -> _Message:
    """As the model wrote it: its texts follow each other directly."""
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, where in blocks:
        kind = block.get("type")
        if kind == "thinking":
            THINKING.check(block, ("type", "thinking"), where)
            thoughts.append(_string(block, "thinking", where))
        elif kind == "redacted_thinking":
            REDACTED_THINKING.check(block, ("type",), where)
        elif kind == "tool_use":
            calls.append(_call(block, where))
        else:
            texts.append(_text(block, where, ("text", "thinking", "redacted_thinking", "tool_use")))
    message: _Message = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    TOOL_USE.check(block, ("type", "id", "name", "input"), where)
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise _wrong(f"{where}.input", "an object", arguments)
    function = {"name": _string(block, "name", where), "arguments": arguments}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


# --- what becomes text


def _text(block: dict[str, Any], where: str, kinds: tuple[str, ...]) -> str:
    """Of a block whose type may be one of `kinds` here."""
    kind = block.get("type")
    if not isinstance(kind, str):
        raise _wrong(f"{where}.type", "a string", kind)
    if kind not in kinds or kind not in _TEXT_OF:
        allowed = f"may hold only blocks of the types {', '.join(kinds)}" if len(kinds) > 1 else "may hold only text blocks"
        field = where.partition("[")[0]
        raise not_supported(field, f"{allowed} here; {where} has the type {shown(kind)}, which is not supported")
    return _TEXT_OF[kind](block, where)


def _plain(block: dict[str, Any], where: str) -> str:
    TEXT.check(block, ("type", "text"), where)
    return _string(block, "text", where)


def _search_result(block: dict[str, Any], where: str) -> str:
    SEARCH_RESULT.check(block, ("type", "title", "source", "content"), where)
    texts = [_text(part, at, ("text",)) for part, at in _blocks(block.get("content"), f"{where}.content")]
    return "\n".join([_string(block, "title", where), _string(block, "source", where), *texts])


def _tool_reference(block: dict[str, Any], where: str) -> str:
    TOOL_REFERENCE.check(block, ("type", "tool_name"), where)
    return _string(block, "tool_name", where)


_TEXT_OF: dict[str, Callable[[dict[str, Any], str], str]] = {
    "text": _plain,
    "search_result": _search_result,
    "tool_reference": _tool_reference,
}


# --- tools


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        what = f"may hold only tools with an input_schema; {where} has the type {shown(kind)}: Anthropic's tools are not served"
        raise not_supported("tools", what)
    TOOL.check(tool, ("type", "name", "description", "input_schema", "strict"), where)
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise _wrong(f"{where}.input_schema", "an object", schema)
    function: dict[str, Any] = {"name": _string(tool, "name", where)}
    if tool.get("description") is not None:
        function["description"] = _string(tool, "description", where)
    function["parameters"] = schema if "type" in schema else {"type": "object", **schema}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice.name is required with the type tool.", param="tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    if choice.name is not None:
        raise RequestError("tool_choice.name is for the type tool only.", param="tool_choice")
    return "required" if choice.type == "any" else choice.type


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", "a string", value)
    return value


def _wrong(where: str, rule: str, value: Any) -> RequestError:
    param = where.partition("[")[0].partition(".")[0]
    return RequestError(f"{where} must be {rule}, got {shown(value)}.", param=param)
