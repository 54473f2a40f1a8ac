"""The tools of a request and which of them may be called, checked: `tools` and `tool_choice` as OpenAI has them.

Knows neither how a model writes calls nor how they are parsed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxserve.parsers.base import Tool
from jaxserve.server.foreign_fields import not_supported
from jaxserve.server.http.body import shown
from jaxserve.server.openai.tool_schemas import check_schema
from jaxserve.server.requests import RequestError

_MODES = ("auto", "none", "required")


@dataclasses.dataclass(frozen=True)
class ToolChoice:
    shown: list[Tool]  # to the model, by the chat template
    callable: list[Tool]  # some of these, or all
    is_forced: bool  # there must be a call

    @property
    def is_narrowed(self) -> bool:
        """The model sees tools that it must not call."""
        return len(self.callable) < len(self.shown)

    @property
    def is_strict(self) -> bool:
        """A tool's arguments must match its schema."""
        return any(tool["function"].get("strict") for tool in self.callable)

    @staticmethod
    def of(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> ToolChoice:
        """Raises RequestError. Takes time in proportion to the schemas, whose types may be renamed in place."""
        mode, names, keeps_others = _read(choice)
        offered = [_checked(tool, f"tools[{i}]") for i, tool in enumerate(tools or [])]
        if mode == "none":
            return ToolChoice([], [], False)
        if mode == "required" and not offered:
            raise RequestError("tool_choice asks for a call, but there are no tools.", param="tool_choice")
        if names is None:
            return ToolChoice(offered, offered, mode == "required")
        by_name = {tool["function"]["name"]: tool for tool in offered}
        for name in names:
            if name not in by_name:
                # SGLang's words, by which its tests know it.
                name_shown = shown(name)[1:-1]
                raise RequestError(f"tool_choice: Tool '{name_shown}' not found in tools list.", param="tool_choice")
        chosen = [tool for tool in offered if tool["function"]["name"] in names]
        return ToolChoice(offered if keeps_others else chosen, chosen, mode == "required")


def _read(choice: Any) -> tuple[Literal["auto", "none", "required"], list[str] | None, bool]:
    """How to choose, from which names (None: all), and whether the model is shown the others, too."""
    if choice is None:
        return "auto", None, True
    if choice in _MODES:
        return choice, None, True
    kind = choice.get("type", "function" if "function" in choice else None) if isinstance(choice, dict) else None
    if kind == "function":
        return "required", [_name(choice, "tool_choice")], False
    if kind == "allowed_tools":
        # The Chat API nests what the Responses API has flat.
        allowed = choice.get("allowed_tools", choice)
        if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list) or not allowed["tools"]:
            raise _wrong("tool_choice.allowed_tools", "an object with a mode and a list of tools", allowed)
        mode = allowed.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise _wrong("tool_choice.allowed_tools.mode", "auto or required", mode)
        places = enumerate(allowed["tools"])
        return mode, [_name(tool, f"tool_choice.allowed_tools.tools[{i}]") for i, tool in places], True
    if isinstance(kind, str):
        raise not_supported("tool_choice", f"must be a function or allowed_tools, got the type {shown(kind)}")
    raise _wrong("tool_choice", "auto, none, required or an object with a type", choice)


def _name(tool: Any, where: str) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _wrong(f"{where}.function", "an object with a name", function)
    return name


def _checked(tool: dict[str, Any], where: str) -> Tool:
    if tool.get("type", "function") != "function":
        raise not_supported(f"{where}.type", f"must be function, got {shown(tool['type'])}")
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise _wrong(f"{where}.function", "an object with a name", function)
    name = f"{where}.function of {shown(function['name'])}"
    if not isinstance(function.get("strict"), bool | None):
        raise _wrong(f"{name}: strict", "true or false", function["strict"])
    if not isinstance(function.get("description"), str | None):
        raise _wrong(f"{name}: description", "a string", function["description"])
    parameters = function.get("parameters")
    if parameters is not None:
        try:
            check_schema(parameters, "parameters")
        except ValueError as error:  # SGLang's words before it
            raise RequestError(f"{name} has an invalid 'parameters' schema: {error}", param="tools") from None
    return tool


def _wrong(where: str, rule: str, value: Any) -> RequestError:
    param = where.partition("[")[0].partition(".")[0]
    return RequestError(f"{where} must be {rule}, got {shown(value)}.", param=param)
