"""Formats in which models call tools, one file each; TOOL_FORMATS has them by the names that SGLang gave them."""

from __future__ import annotations

from jaxserve.parsers.base import ToolFormat
from jaxserve.parsers.tools.qwen25 import Qwen25Format

_QWEN25 = Qwen25Format()
TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": _QWEN25,
    "qwen": _QWEN25,
    "qwen25": _QWEN25,
}
