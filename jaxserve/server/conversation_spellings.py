"""Other spellings of a conversation, for templates that cannot render OpenAI's.

Some take functions without their wrapping, some (Mistral's) take ids of calls that are nine letters and digits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_SHORT_ID_CHARS = 9

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]


def other_spellings(messages: Messages, tools: Tools | None) -> Iterator[tuple[Messages, Tools | None]]:
    """Each that differs."""
    flat = [tool.get("function", tool) for tool in tools or []] or None
    if flat != tools:
        yield messages, flat
    renamed = [_with_short_ids(message) for message in messages]
    if renamed != messages:
        yield renamed, tools
        if flat != tools:
            yield renamed, flat


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if message.get("tool_call_id") is not None:
        changed["tool_call_id"] = _short(message["tool_call_id"])
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [{**call, "id": _short(call["id"])} if call.get("id") is not None else call for call in calls]
    return changed


def _short(call_id: Any) -> str:
    """Always the same of an id."""
    text = str(call_id)
    return text if _SHORT_ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:_SHORT_ID_CHARS]
