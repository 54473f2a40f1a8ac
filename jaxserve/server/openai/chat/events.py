"""The events of a streamed chat completion.

A choice greets with its role, its text comes in deltas, and an event of its own says how it ended. Where a message may be more
than its text, a parser stands between chunk and deltas; where it cannot, a chunk's text is its delta (the hot path).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from jaxserve.parsers.message import MessageParser
from jaxserve.parsers.pieces import CallArguments, CallBegin, Content, Piece, Reasoning
from jaxserve.server.openai.chat.message import Call, call_fields, call_id
from jaxserve.server.openai.chat.plan import ChatJob
from jaxserve.server.openai.chat.reply import meta_info
from jaxserve.server.openai.collect import Ending
from jaxserve.server.openai.logprobs import chat_logprobs
from jaxserve.server.openai.streaming import ChoiceEvents, StreamWriter, TextField
from jaxserve.server.requests import GenerationChunk

_encode = msgspec.json.encode

# As SGLang's: every delta has reasoning_content, which OpenAI's client offers as an attribute only then; role and content stand
# where they say something.
_ROLE_DELTA = b'"delta":{"role":"assistant","content":"","reasoning_content":null}'
_CONTENT_DELTA = (b'"delta":{"content":', b',"reasoning_content":null}')
_REASONING_DELTA = (b'"delta":{"reasoning_content":', b"}")
_EMPTY_DELTA = b'"delta":{"reasoning_content":null}'


def events_of(job: ChatJob) -> ChoiceEvents:
    return _ParsedEvents(job) if job.is_parsed else _Events(job)


class _Events(ChoiceEvents):
    def __init__(self, job: ChatJob) -> None:
        body, args = job.body, job.context.args
        writer = StreamWriter("chat.completion.chunk", job.reply_id, job.created_s, body, job.model, args)
        super().__init__(writer, TextField(*_CONTENT_DELTA), job.usage, body)
        self._job = job

    def _events(self, chunk: GenerationChunk, is_first: bool) -> Iterator[bytes]:
        if is_first:
            yield self._greeting(chunk)
        if chunk.text or chunk.logprobs or (self._with_ids and chunk.token_ids):
            yield self._writer.choice(
                chunk, self._text.json(chunk.text), self._logprobs(chunk), None, self._ids(chunk), self._usage
            )
        if chunk.finish_reason is not None:
            yield self._goodbye(chunk, Ending.of(chunk.finish_reason))

    def _hidden_states_event(self, chunk: GenerationChunk, field: dict[str, Any]) -> bytes:
        delta = b'"delta":' + _encode({"reasoning_content": None, **field})
        return self._writer.choice(chunk, delta, None, None, {}, self._usage)

    def _greeting(self, chunk: GenerationChunk) -> bytes:
        prompt = {"prompt_token_ids": self._job.prompt_ids} if self._job.body.return_prompt_token_ids else {}
        return self._writer.choice(chunk, _ROLE_DELTA, None, None, prompt, self._usage)

    def _goodbye(self, chunk: GenerationChunk, ending: Ending) -> bytes:
        meta = {"meta_info": meta_info(chunk)} if self._job.body.return_meta_info else {}
        return self._writer.choice(chunk, _EMPTY_DELTA, None, ending, meta, self._usage)

    def _logprobs(self, chunk: GenerationChunk) -> dict[str, Any] | None:
        return chat_logprobs(chunk.logprobs, self._job.context.texts) if chunk.logprobs else None


class _Choice:
    """One that is being parsed."""

    __slots__ = ("has_calls", "held", "parser")

    def __init__(self, parser: MessageParser) -> None:
        self.parser = parser
        self.has_calls = False
        self.held: list[str] = []  # thinking that is to be told as a whole

    def pieces(self, chunk: GenerationChunk) -> list[Piece]:
        pieces = self.parser.feed(chunk.text)
        if chunk.finish_reason is not None:
            pieces += self.parser.finish()
        self.has_calls = self.has_calls or any(isinstance(piece, CallBegin) for piece in pieces)
        return pieces


class _ParsedEvents(_Events):
    def __init__(self, job: ChatJob) -> None:
        super().__init__(job)
        self._reasoning = TextField(*_REASONING_DELTA)
        self._holds_reasoning = job.body.stream_reasoning is False
        self._choices: dict[int, _Choice] = {}

    def push(self, chunk: GenerationChunk) -> bytes:
        self._note(chunk)
        choice = self._choices.get(chunk.index)
        if choice is None or chunk.finish_reason or chunk.logprobs or self._with_ids or self._holds_reasoning:
            return b"".join(self._more(chunk))
        return b"".join([self._delta(chunk, piece, None, {}) for piece in choice.pieces(chunk)])

    def _events(self, chunk: GenerationChunk, is_first: bool) -> Iterator[bytes]:
        if is_first:
            self._choices[chunk.index] = _Choice(self._job.message_parser())
            yield self._greeting(chunk)
        choice = self._choices[chunk.index]
        pieces = choice.pieces(chunk)
        if self._holds_reasoning:
            pieces = _held_back(choice, pieces, is_last=chunk.finish_reason is not None)
        # They come with the first event of their chunk, or alone.
        logprobs, ids = self._logprobs(chunk), self._ids(chunk) if chunk.token_ids else {}
        for piece in pieces:
            yield self._delta(chunk, piece, logprobs, ids)
            logprobs, ids = None, {}
        if logprobs or ids:
            yield self._writer.choice(chunk, _EMPTY_DELTA, logprobs, None, ids, self._usage)
        if chunk.finish_reason is not None:
            yield self._goodbye(chunk, Ending.of(chunk.finish_reason, has_calls=choice.has_calls))

    def _delta(self, chunk: GenerationChunk, piece: Piece, logprobs: Any, ids: dict[str, Any]) -> bytes:
        if isinstance(piece, Content | Reasoning):
            field = self._text if isinstance(piece, Content) else self._reasoning
            if not logprobs and not ids:
                return self._writer.text(chunk, piece.text, field, self._usage)
            delta = field.json(piece.text)
        else:
            delta = b'"delta":{"reasoning_content":null,"tool_calls":[' + _encode(_call_delta(piece)) + b"]}"
        return self._writer.choice(chunk, delta, logprobs, None, ids, self._usage)


def _call_delta(piece: CallBegin | CallArguments) -> dict[str, Any]:
    """The name comes first and the arguments bit by bit, as OpenAI's do."""
    if isinstance(piece, CallBegin):
        return {"index": piece.call, **call_fields(Call(call_id(piece), piece.name))}
    return {"index": piece.call, "function": {"arguments": piece.text}}


def _held_back(choice: _Choice, pieces: list[Piece], *, is_last: bool) -> list[Piece]:
    """The pieces without thinking, which comes whole before what follows it."""
    told: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Reasoning):
            choice.held.append(piece.text)
            continue
        told += _released(choice)
        told.append(piece)
    return told + _released(choice) if is_last else told


def _released(choice: _Choice) -> list[Piece]:
    text, choice.held = "".join(choice.held), []
    return [Reasoning(text)] if text else []
