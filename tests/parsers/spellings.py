"""How each tool format writes calls, as the models' chat templates do; the test's own, beside the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def qwen25(calls: Sequence[Call]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {dumps(args)}}}\n</tool_call>' for name, args in calls)


SPELLINGS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": qwen25,
    "qwen": qwen25,
    "qwen25": qwen25,
}
