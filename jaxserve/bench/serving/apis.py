"""The APIs that are spoken: the body of a request, and what an event of a reply says.

An event may bring a token, several, or none: the role at the start of a chat, the usage at the end, half a character. Only
events that bring text count as arrivals; how many tokens each brought is what the event itself says (`meta_info`, or `usage`
with stream_options.continuous_usage_stats), or 0 where it does not: `metrics` then works it out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.bench.serving.options import CHAT, NATIVE
from jaxserve.bench.serving.work import ABORTED, IN_STREAM, UNREADABLE, Content, Load, Outcome, Task

PATHS = {"native": "/generate", "completions": "/v1/completions", "chat": "/v1/chat/completions"}


class ReplyError(Exception):
    """An event that says that the request failed."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


# --- bodies


def body_of(load: Load, task: Task, content: Content) -> dict[str, Any]:
    make = {NATIVE: _native_body, CHAT: _chat_body}.get(load.api, _completions_body)
    body = make(load, task, content)
    if task.lora_name is not None:
        body["lora_path"] = task.lora_name
    for name, value in load.extra_body.items():
        own = body.get(name)
        body[name] = {**own, **value} if isinstance(own, dict) and isinstance(value, dict) else value
    return body


def _native_body(load: Load, task: Task, content: Content) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": load.temperature, "max_new_tokens": task.output_len}
    sampling["ignore_eos"] = load.ignore_eos and task.schema is None
    if load.top_p < 1:
        sampling["top_p"] = load.top_p
    if task.schema is not None:
        sampling["json_schema"] = msgspec.json.encode(task.schema).decode()
    prompt = {"text": content} if isinstance(content, str) else {"input_ids": content}
    return {**prompt, "sampling_params": sampling, "stream": load.stream}


def _openai_body(load: Load, task: Task) -> dict[str, Any]:
    limit = "max_completion_tokens" if load.api == CHAT else "max_tokens"
    # vLLM has adapters as models, SGLang as lora_path, of which each ignores the other's.
    body: dict[str, Any] = {"model": task.lora_name or load.model, limit: task.output_len, "temperature": load.temperature}
    body |= {"ignore_eos": load.ignore_eos and task.schema is None, "stream": load.stream}
    if load.top_p < 1:
        body["top_p"] = load.top_p
    if load.stream:
        body["stream_options"] = {"include_usage": True}
    if load.wants_cached:
        body["return_cached_tokens_details"] = True
    if task.schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": task.schema}}
    return body


def _completions_body(load: Load, task: Task, content: Content) -> dict[str, Any]:
    return {**_openai_body(load, task), "prompt": content}


def _chat_body(load: Load, task: Task, content: Content) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return {**_openai_body(load, task), "messages": messages}


def next_content(before: Content, answer: str, turn: Content) -> Content:
    """What the next turn of a conversation sends: all that was said, and the new question."""
    question = turn if isinstance(turn, str) else str(turn)
    if isinstance(before, str):
        return f"{before}{answer}\n\n{question}"
    return [*before, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


# --- events


class _Finish(msgspec.Struct):
    type: str = ""
    message: str | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    spec_verify_ct: int | None = None
    finish_reason: _Finish | None = None


class _NativeEvent(msgspec.Struct):
    text: str = ""
    meta_info: _Meta | None = None
    error: Any = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Call(msgspec.Struct):
    function: dict[str, Any] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None


class _OpenAIEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    sglext: dict[str, Any] | None = None
    error: Any = None


_decode_native = msgspec.json.Decoder(_NativeEvent).decode
_decode_openai = msgspec.json.Decoder(_OpenAIEvent).decode


class Reading:
    """Takes the events of one reply into its Outcome."""

    def __init__(self, load: Load, outcome: Outcome) -> None:
        self._outcome = outcome
        self._incremental = load.incremental
        self._pieces: list[str] = []
        self._num_tokens = 0
        self._take = self._take_native if load.api == NATIVE else self._take_openai
        self.finished = False  # the model has ended, whether or not the stream has said goodbye

    def take(self, data: bytes, now_s: float) -> None:
        """One event's JSON, which arrived `now_s` after the request was sent. Raises ReplyError."""
        self._outcome.num_events += 1
        try:
            self._take(data, now_s)
        except msgspec.MsgspecError as error:
            raise ReplyError(UNREADABLE, f"{error}: {data[:200].decode(errors='replace')}") from None

    def end(self) -> None:
        outcome = self._outcome
        if self._pieces:
            outcome.text = "".join(self._pieces)
        if outcome.output_len is None and self._num_tokens:
            outcome.output_len = self._num_tokens
        if outcome.output_len == len(outcome.times_s) or all(outcome.tokens):
            outcome.texts = []  # nothing to work out

    def _arrived(self, now_s: float, tokens: int, text: str) -> None:
        self._outcome.times_s.append(now_s)
        self._outcome.tokens.append(tokens)
        self._outcome.texts.append(text)

    def _take_native(self, data: bytes, now_s: float) -> None:
        event = _decode_native(data)
        if event.error:
            raise ReplyError(IN_STREAM, _message(event.error))
        meta, outcome = event.meta_info or _Meta(), self._outcome
        new = meta.completion_tokens - self._num_tokens
        if new > 0:
            self._arrived(now_s, new, "")
            self._num_tokens = meta.completion_tokens
        if self._incremental:
            self._pieces.append(event.text)
        elif event.text:
            outcome.text = event.text
        outcome.server_prompt_len, outcome.cached_tokens = meta.prompt_tokens, meta.cached_tokens
        outcome.output_len, outcome.verify_steps = self._num_tokens, meta.spec_verify_ct or 0
        if meta.finish_reason is not None:
            self.finished = True
            if meta.finish_reason.type == "abort":
                raise ReplyError(ABORTED, meta.finish_reason.message or "no reason given")

    def _take_openai(self, data: bytes, now_s: float) -> None:
        event = _decode_openai(data)
        if event.error:
            raise ReplyError(IN_STREAM, _message(event.error))
        new = 0
        if event.usage is not None:
            new = self._take_usage(event.usage)
        if event.sglext:
            details = event.sglext.get("cached_tokens_details")
            if isinstance(details, dict):
                self._outcome.cached_tokens = sum(n for n in details.values() if isinstance(n, int))
        for choice in event.choices:
            text = choice.text or _text_of(choice.delta) or _text_of(choice.message)
            if text:
                self._arrived(now_s, new, text)
                self._pieces.append(text)
            if choice.finish_reason is not None:
                self.finished = True
                if choice.finish_reason == "abort":
                    raise ReplyError(ABORTED, "finish_reason abort")

    def _take_usage(self, usage: _Usage) -> int:
        """Tokens that are new since the last usage; that of the closing event, alone, comes too late to say it."""
        outcome, total = self._outcome, usage.completion_tokens
        if usage.prompt_tokens is not None:
            outcome.server_prompt_len = usage.prompt_tokens
        if usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens is not None:
            outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if total is None:
            return 0
        new, self._num_tokens, outcome.output_len = total - self._num_tokens, total, total
        return max(new, 0)


def _text_of(delta: _Delta | None) -> str:
    if delta is None:
        return ""
    calls = "".join(str((call.function or {}).get("arguments") or "") for call in delta.tool_calls or ())
    return (delta.reasoning_content or delta.reasoning or "") + (delta.content or "") + calls


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
