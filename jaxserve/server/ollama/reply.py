"""Ollama's replies: JSON objects, of which a stream has one in each line. The last says how and when the reply ended."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from jaxserve.parsers.base import Parser
from jaxserve.parsers.pieces import CallArguments, CallBegin, Content, Piece, Reasoning
from jaxserve.server.call_arguments import arguments_object
from jaxserve.server.http.envelopes import OLLAMA
from jaxserve.server.openai.collect import Sequence
from jaxserve.server.openai.logprobs import chat_logprobs
from jaxserve.server.requests import GenerationChunk, RequestError, TokenLogprob, new_rid, raise_if_failed
from jaxserve.server.token_texts import TokenTexts

_encode = msgspec.json.encode
_NS_PER_S = 1_000_000_000

# From (text, thinking, calls) to the fields that hold them.
Shape = Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]


def chat_shape(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def generate_shape(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"response": text, "thinking": thinking} if thinking else {"response": text}


class Lines:
    """Makes the objects of one request, and is the EventWriter of its stream. Calls are told whole."""

    def __init__(self, model: str, parser: Parser, shape: Shape, texts: TokenTexts) -> None:
        self._model = model
        self._parser = parser
        self._shape = shape
        self._texts = texts
        self._num_calls = 0
        self._call: CallBegin | None = None  # the one whose arguments are coming
        self._arguments: list[str] = []

    def push(self, chunk: GenerationChunk) -> bytes:
        raise_if_failed(chunk)
        pieces = self._parser.feed(chunk.text)
        if chunk.finish_reason is None:
            fields = self._fields(pieces, chunk.logprobs, is_end=False)
            return b"" if fields is None else self._line(fields)
        fields = self._fields(pieces + self._parser.finish(), chunk.logprobs, is_end=True)
        before = b"" if fields is None else self._line(fields)
        return before + self._line({**self._shape("", "", []), **_ending(chunk)})

    def end(self) -> bytes:
        return b""

    def error(self, error: RequestError) -> bytes:
        return _encode(OLLAMA.body(error)) + b"\n"

    def whole(self, sequence: Sequence) -> bytes:
        """A reply in one piece."""
        assert sequence.last is not None, "a sequence is read before its last chunk"
        pieces = [*self._parser.feed(sequence.text), *self._parser.finish()]
        fields = self._fields(pieces, sequence.logprobs, is_end=True) or self._shape("", "", [])
        return self._line({**fields, **_ending(sequence.last)})

    def empty(self, done_reason: str) -> bytes:
        """The answer to a request that only asks for the model to be there, or not."""
        return self._line({**self._shape("", "", []), "done": True, "done_reason": done_reason})

    def _line(self, fields: dict[str, Any]) -> bytes:
        now = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
        return _encode({"model": self._model, "created_at": now, "done": False, **fields}) + b"\n"

    def _fields(self, pieces: Iterable[Piece], logprobs: list[TokenLogprob], *, is_end: bool) -> dict[str, Any] | None:
        """None: there is nothing to say yet."""
        text: list[str] = []
        thinking: list[str] = []
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            if not isinstance(piece, CallArguments):
                calls += self._finished_call()
            match piece:
                case Content(part):
                    text.append(part)
                case Reasoning(part):
                    thinking.append(part)
                case CallBegin():
                    self._call = piece
                case CallArguments(_, part):
                    self._arguments.append(part)
        if is_end:
            calls += self._finished_call()
        if not (text or thinking or calls or logprobs):
            return None
        fields = self._shape("".join(text), "".join(thinking), calls)
        return {**fields, "logprobs": chat_logprobs(logprobs, self._texts)["content"]} if logprobs else fields

    def _finished_call(self) -> list[dict[str, Any]]:
        call, self._call = self._call, None
        if call is None:
            return []
        function = {"index": self._num_calls, "name": call.name, "arguments": arguments_object("".join(self._arguments))}
        self._num_calls += 1
        self._arguments = []
        return [{"id": call.id or f"call_{new_rid()}", "function": function}]


def _ending(last: GenerationChunk) -> dict[str, Any]:
    assert last.finish_reason is not None, f"{last.rid} has not ended"
    total_s = last.meta.get("e2e_latency", 0.0)
    prompt_s = min(last.meta.get("first_token_latency", total_s), total_s)
    return {
        "done": True,
        "done_reason": last.finish_reason.type,
        "total_duration": int(total_s * _NS_PER_S),
        "load_duration": 0,
        "prompt_eval_count": last.prompt_tokens,
        "prompt_eval_duration": int(prompt_s * _NS_PER_S),
        "eval_count": last.completion_tokens,
        "eval_duration": int((total_s - prompt_s) * _NS_PER_S),
    }
