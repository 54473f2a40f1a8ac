"""Calls as a JSON array: [{"name": "f", "parameters": {...}}, ...]. For models whose own way to call is not known: a grammar
makes them write this, where a call is forced."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxserve.parsers.base import Parser, Tool


class JsonArrayFormat:
    keeps_special_tokens = False

    def parser(self, tools: Sequence[Tool]) -> Parser:
        raise NotImplementedError

    def structural_tag(self, tools: Sequence[Tool], *, at_least_one: bool, stop_after_first: bool) -> dict[str, Any]:
        assert at_least_one, "an array is no text in which calls could stand"
        calls = [
            {
                "type": "tag",
                "begin": f'{{"name": {json.dumps(tool["function"]["name"])}, "parameters": ',
                "content": {
                    "type": "json_schema",
                    "json_schema": {"type": "object", **(tool["function"].get("parameters") or {})},
                },
                "end": "}",
            }
            for tool in tools
        ]
        array = {
            "type": "tags_with_separator",
            "tags": calls,
            "separator": ", ",
            "at_least_one": True,
            "stop_after_first": stop_after_first,
        }
        brackets = [{"type": "const_string", "value": bracket} for bracket in "[]"]
        elements = [brackets[0], array, brackets[1]]
        return {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
