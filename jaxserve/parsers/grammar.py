"""The words of structural tags: JSON objects that say what text may come, which the grammar compiler reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.parsers.base import Tool

Node = dict[str, Any]


def name_of(tool: Tool) -> str:
    return str(tool["function"]["name"])


def schema_of(tool: Tool) -> dict[str, Any]:
    return {"type": "object", **(tool["function"].get("parameters") or {})}


def required(tool: Tool) -> list[str]:
    names = schema_of(tool).get("required")
    return names if isinstance(names, list) else []


def schema(json_schema: Any) -> Node:
    return {"type": "json_schema", "json_schema": json_schema}


def arguments(tool: Tool) -> Node:
    """An object with the tool's arguments."""
    return schema(schema_of(tool))


def standalone(json_schema: Any, around: dict[str, Any]) -> Any:
    """The schema of one argument, with the definitions that it may refer to."""
    definitions = {word: around[word] for word in ("$defs", "definitions") if word in around}
    return {**definitions, **json_schema} if isinstance(json_schema, dict) else json_schema


def const(text: str) -> Node:
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> Node:
    return {"type": "regex", "pattern": pattern}


def sequence(*elements: Node) -> Node:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Node) -> Node:
    return {"type": "or", "elements": list(elements)}


def any_text() -> Node:
    return {"type": "any_text"}


def tag(begin: str, content: Node, end: str) -> Node:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def tags_with_separator(tags: Sequence[Node], separator: str, *, stop_after_first: bool) -> Node:
    """At least one of the tags."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": stop_after_first,
    }


def structural_tag(node: Node) -> dict[str, Any]:
    return {"type": "structural_tag", "format": node}


def triggered_tags(trigger: str, tags: Sequence[Node], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
    """A structural tag: free text, in which the trigger begins one of the tags."""
    return structural_tag(
        {
            "type": "triggered_tags",
            "triggers": [trigger],
            "tags": list(tags),
            "at_least_one": at_least_one,
            "stop_after_first": stop_after_first,
        }
    )


def section_of_calls(
    begin: str, calls: Sequence[Node], separator: str, end: str, *, at_least_one: bool, stop_after_first: bool
) -> dict[str, Any]:
    """A structural tag: free text, then all calls between `begin` and `end`."""
    section = tag(begin, tags_with_separator(calls, separator, stop_after_first=stop_after_first), end)
    return triggered_tags(begin, [section], at_least_one=at_least_one, stop_after_first=stop_after_first)
