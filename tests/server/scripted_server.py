"""A live server whose model says what a test tells it to, and a message of thinking, text and calls for it to say."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Self

from fake_service import FakeService
from http_harness import live_server

PARSERS = {"reasoning_parser": "qwen3", "tool_call_parser": "qwen25"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
MESSAGE = f"<think>\nHm, Köln.\n</think>\n\nI look.\n{CALL}\n{CALL.replace('Köln', 'Bonn')}"


class ScriptedServer:
    """One for a whole file; each test says what its model does."""

    def __init__(self) -> None:
        self.service = FakeService()
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self, **options: Any) -> AsyncIterator[Self]:
        async with live_server(self.service, api_key="k", **PARSERS, **options) as self.url:
            yield self

    def reset(self) -> Self:
        """For the next test."""
        self.service.__init__()  # type: ignore[misc]
        return self


def cut(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]
