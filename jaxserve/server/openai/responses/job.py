"""One response from its chunks to its object, streamed or not, and what is kept of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from contextlib import aclosing
from typing import Any

import msgspec

from jaxserve.server.http.envelopes import OPENAI
from jaxserve.server.openai.chat import ChatJob
from jaxserve.server.openai.logprobs import chat_logprobs
from jaxserve.server.openai.responses.output import Event, Output
from jaxserve.server.openai.responses.protocol import ResponsesRequest
from jaxserve.server.openai.responses.request import functions_of
from jaxserve.server.openai.responses.store import Kept, ResponseStore
from jaxserve.server.requests import GenerationChunk, RequestError, raise_if_failed

_encode = msgspec.json.encode


@dataclasses.dataclass
class ResponseJob:
    """`items` are those of the conversation so far, the request's own included."""

    body: ResponsesRequest
    chat: ChatJob
    items: list[dict[str, Any]]
    store: ResponseStore
    completed_s: int | None = None

    def __post_init__(self) -> None:
        self._parser = self.chat.message_parser()
        self.output = Output({tool["function"]["name"]: namespace for tool, namespace in functions_of(self.body)})

    @property
    def id(self) -> str:
        return self.chat.reply_id

    async def run(self) -> dict[str, Any]:
        """To its end. Raises RequestError if the server failed to serve it."""
        async with aclosing(self.chat.context.service.generate(self.chat.generate)) as chunks:
            async for chunk in chunks:
                raise_if_failed(chunk)
                for _ in self.add(chunk):
                    pass
                if chunk.finish_reason is not None:
                    return self.finish(chunk)
        raise AssertionError(f"{self.id} has ended without its last chunk")

    def add(self, chunk: GenerationChunk) -> Iterable[Event]:
        self.chat.usage.add(chunk)
        logprobs = chat_logprobs(chunk.logprobs, self.chat.context.texts)["content"] if chunk.logprobs else []
        yield from self.output.add(self._parser.feed(chunk.text), logprobs)
        if chunk.finish_reason is not None:
            yield from self.output.add(self._parser.finish(), [])
            yield from self.output.close("completed" if chunk.finish_reason.type == "stop" else "incomplete")

    def finish(self, last: GenerationChunk) -> dict[str, Any]:
        """The whole response, which is kept from now on."""
        assert last.finish_reason is not None, f"{self.id} has not ended"
        self.completed_s = int(time.time())
        usage = self.chat.usage.total()
        status = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}[last.finish_reason.type]
        response = {
            **self.shape(status, self.output.items),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": last.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": usage["reasoning_tokens"]},
                "total_tokens": usage["total_tokens"],
            },
        }
        if self.body.is_kept:
            self.store.put(self.id, Kept(_encode(response), _encode([*self.items, *self.output.items])))
        return response

    def shape(self, status: str, output: list[dict[str, Any]], error: RequestError | None = None) -> dict[str, Any]:
        body, params = self.body, self.chat.generate.sampling_params[0]
        reasoning, text = body.reasoning, body.text
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.chat.created_s,
            "completed_at": self.completed_s if status == "completed" else None,
            "status": status,
            "background": bool(body.background),
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.chat.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "service_tier": "default",
            "store": body.is_kept and self.store.is_open,
            "temperature": params.temperature,
            "text": {"format": (text.format if text else None) or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": body.metadata or {},
        }


class ResponseEvents:
    """An EventWriter of one response."""

    def __init__(self, job: ResponseJob) -> None:
        self._job = job
        self._number = 0
        self._has_begun = False

    def push(self, chunk: GenerationChunk) -> bytes:
        raise_if_failed(chunk)
        events: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            begun = self._job.shape("in_progress", [])
            events = [self._event({"type": f"response.{name}", "response": begun}) for name in ("created", "in_progress")]
        events += [self._event(event) for event in self._job.add(chunk)]
        if chunk.finish_reason is not None:
            response = self._job.finish(chunk)
            name = "completed" if response["status"] == "completed" else "incomplete"
            events.append(self._event({"type": f"response.{name}", "response": response}))
        return b"".join(events)

    def end(self) -> bytes:
        return b""

    def error(self, error: RequestError) -> bytes:
        fields = OPENAI.body(error)["error"]
        told = {"type": "error", "code": str(fields["code"]), "message": fields["message"], "param": fields["param"]}
        failed = {"type": "response.failed", "response": self._job.shape("failed", self._job.output.items, error)}
        return self._event(told) + self._event(failed)

    def _event(self, fields: Event) -> bytes:
        data = _encode({"type": fields["type"], "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), data)
