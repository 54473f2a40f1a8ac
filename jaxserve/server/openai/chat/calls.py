"""How the calls of a chat completion are written, and what the output must match so that they are as asked for."""

from __future__ import annotations

from typing import Any

from jaxserve.config import ServerArgs
from jaxserve.parsers.base import Tool, ToolFormat
from jaxserve.parsers.tools.json_array import JsonArrayFormat
from jaxserve.server.foreign_fields import not_supported
from jaxserve.server.openai.constraints import lenient, with_calls
from jaxserve.server.openai.tool_choice import ToolChoice
from jaxserve.server.requests import RequestError
from jaxserve.types import Grammar


def call_format(choice: ToolChoice, known: ToolFormat | None) -> ToolFormat | None:
    """None: no calls are made. `known` is the server's. A call that there must be can be written as plain JSON; of a model that
    may call, nobody could tell how it does."""
    if not choice.callable:
        return None
    if known is None and not choice.is_forced:
        raise not_supported(
            "tools",
            "with tool_choice auto needs the option --tool-call-parser, which says how the model writes calls; without it "
            "they would come back as text. required, none and the name of a tool do without",
        )
    return known or JsonArrayFormat()


def grammar_of_calls(
    choice: ToolChoice, calls: ToolFormat, grammar: Grammar | None, args: ServerArgs, *, only_one: bool
) -> Grammar | None:
    """What the output must match: `grammar` is what the request asks for besides its tools. Where a call is forced, that has
    nothing to say; where it is not, the model answers so or calls."""
    needs_grammar = {
        "tool_choice": choice.is_forced or choice.is_narrowed,
        "tools": choice.is_strict,
        "parallel_tool_calls": only_one,
    }
    reason = next((field for field, needed in needs_grammar.items() if needed), None)
    if reason is None and grammar is None:
        return None
    if reason is not None and args.grammar_backend == "none":
        message = f"{reason} asks for constrained output, which is not available: this server runs with --grammar-backend none."
        raise RequestError(message, param=reason)
    must_call = choice.is_forced or grammar is not None
    tools = [tool if tool["function"].get("strict") else _not_strict(tool) for tool in choice.callable]
    tag = calls.structural_tag(tools, at_least_one=must_call, stop_after_first=only_one)
    return with_calls(None if choice.is_forced else grammar, tag)


def _not_strict(tool: Tool) -> Tool:
    """With a schema of which what grammars do not know is ignored. Some models write each parameter by itself."""
    function = tool["function"]
    schema: dict[str, Any] = lenient(function.get("parameters") or {})
    if schema.get("properties"):
        schema["properties"] = {name: lenient(part) for name, part in schema["properties"].items()}
    return {**tool, "function": {**function, "parameters": schema}}
