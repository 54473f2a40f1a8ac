"""What Anthropic's replies are made of: the message object, its blocks, why it ended, and its usage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxserve.parsers.pieces import CallBegin, Content, Piece, Reasoning
from jaxserve.server.call_arguments import arguments_object
from jaxserve.server.openai.collect import Usage
from jaxserve.server.requests import GenerationChunk, new_rid

# Clients keep and send back thinking that is signed. There is nothing here to be proven.
SIGNATURE = "jaxserve"


class StopReason(NamedTuple):
    reason: str
    sequence: str | None = None


@dataclasses.dataclass
class _Block:
    kind: str  # thinking, text or tool_use
    head: dict[str, Any]
    texts: list[str]


def begun_block(piece: Piece, current: str | None) -> dict[str, Any] | None:
    """The block that the piece begins, still empty; None if it belongs to the current one, of the type given."""
    match piece:
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""} if current != "thinking" else None
        case Content():
            return {"type": "text", "text": ""} if current != "text" else None
        case CallBegin(_, name, call_id):
            return {"type": "tool_use", "id": call_id or f"toolu_{new_rid()}", "name": name, "input": {}}
    return None


def content_blocks(pieces: Iterable[Piece], *, shows_thinking: bool) -> list[dict[str, Any]]:
    """Of a whole message. There is at least one, as in SGLang: clients read the first without looking."""
    blocks: list[_Block] = []
    for piece in pieces:
        head = begun_block(piece, blocks[-1].kind if blocks else None)
        if head is not None:
            blocks.append(_Block(head["type"], head, []))
        if not isinstance(piece, CallBegin):
            blocks[-1].texts.append(piece.text)
    return [_filled(block, shows_thinking) for block in blocks] or [EMPTY_BLOCK]


EMPTY_BLOCK = {"type": "text", "text": ""}


def _filled(block: _Block, shows_thinking: bool) -> dict[str, Any]:
    text = "".join(block.texts)
    match block.kind:
        case "thinking":
            return {**block.head, "thinking": text if shows_thinking else "", "signature": SIGNATURE}
        case "text":
            return {**block.head, "text": text}
    return {**block.head, "input": arguments_object(text)}


def stop_reason(last: GenerationChunk, max_tokens: int, *, has_calls: bool) -> StopReason:
    reason = last.finish_reason
    assert reason is not None, f"{last.rid} has not ended"
    if reason.type == "length":
        # It was cut to what the context had room for.
        return StopReason("max_tokens" if last.completion_tokens >= max_tokens else "model_context_window_exceeded")
    if reason.type == "abort":
        return StopReason("pause_turn")  # somebody aborted it; sent back, it goes on
    if isinstance(reason.matched, str):
        return StopReason("stop_sequence", reason.matched)
    return StopReason("tool_use" if has_calls else "end_turn")


def begun_usage(chunk: GenerationChunk) -> dict[str, Any]:
    """Anthropic's input_tokens are those that were not cached."""
    return {
        "input_tokens": chunk.prompt_tokens - chunk.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": chunk.cached_tokens,
        "output_tokens": 0,
    }


def final_usage(last: GenerationChunk, usage: Usage) -> dict[str, Any]:
    details = {"thinking_tokens": usage.total()["reasoning_tokens"]}
    return {**begun_usage(last), "output_tokens": last.completion_tokens, "output_tokens_details": details}


def message(
    message_id: str, model: str, content: list[dict[str, Any]], stop: StopReason | None, used: dict[str, Any]
) -> dict[str, Any]:
    """`stop` is None where a stream begins."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop.reason if stop else None,
        "stop_sequence": stop.sequence if stop else None,
        "usage": used,
    }
