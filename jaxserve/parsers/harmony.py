"""Harmony, in which gpt-oss writes: messages, each with a header that names its channel and to whom it goes.

<|channel|>analysis<|message|>...<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>

Thinking is the channel analysis; a call goes to functions.NAME; what else there is, is content.
"""

from __future__ import annotations

import re

from jaxserve.parsers.reader import Tags

START, CHANNEL, MESSAGE, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
HEADERS = Tags(START, CHANNEL)
ENDS = Tags("<|end|>", "<|return|>", CALL)
HEADER_END = re.compile(re.escape(MESSAGE))
LONGEST_HEADER = 512
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


def recipient(header: str) -> str | None:
    match = _RECIPIENT.search(header)
    return match[1] if match is not None else None


def is_analysis(header: str) -> bool:
    return _ANALYSIS.search(header) is not None
