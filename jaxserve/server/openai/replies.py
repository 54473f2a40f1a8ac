"""What whole replies of completions and chat completions have in common."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from jaxserve.server.long_json import json_blocks
from jaxserve.server.openai.collect import Sequence, Usage
from jaxserve.server.openai.protocol import OpenAIRequest


def whole_reply(
    object_name: str,
    reply_id: str,
    created_s: int,
    choices: list[dict[str, Any]],
    sequences: Many[Sequence],
    usage: Usage,
    request: OpenAIRequest,
    model: str,
) -> list[bytes]:
    """`sequences` are those of the request, not all of which need to be choices."""
    version = next((sequence.last.weight_version for sequence in sequences if sequence.last is not None), "")
    reply: dict[str, Any] = {
        "id": reply_id,
        "object": object_name,
        "created": created_s,
        "model": model,
        "choices": choices,
        "usage": usage.total(),
        "metadata": {"weight_version": version},  # as SGLang's
    }
    if sglext := usage.sglext(request):
        reply["sglext"] = sglext
    return json_blocks(reply, is_long=any(sequence.num_numbers for sequence in sequences))
