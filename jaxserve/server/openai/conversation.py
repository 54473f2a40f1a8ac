"""A conversation and all that shapes its prompt: what chat completions and /tokenize hand to the model's chat template."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jaxserve.server.chat_templates import TemplateArguments
from jaxserve.server.http.service import GenerationService
from jaxserve.server.openai.messages import template_messages
from jaxserve.server.openai.thinking import check_effort
from jaxserve.server.openai.tool_choice import ToolChoice
from jaxserve.server.requests import RequestError
from jaxserve.server.text_lanes import INLINE_CHARS, LONG_CHARS

# A message, content part or tool takes about as long to check and render as so many characters to tokenize.
CHARS_PER_PIECE = 50

# By these names templates are told whether the model shall think.
_THINKING_KWARGS = ("thinking", "enable_thinking")


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Made by `checked`: messages and arguments are what the template takes."""

    messages: list[dict[str, Any]]
    tools: ToolChoice
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]
    weight: int  # what it costs to render, in characters

    @staticmethod
    async def checked(
        service: GenerationService,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        reasoning_effort: str | float | None = None,
        thinking: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Conversation:
        """From a request's fields; raises RequestError. `thinking`: whether the model shall; an effort says it, too."""
        weight = _weight(messages, tools or [], service.context_len)
        checked_messages, choice = await service.lanes.run(
            weight, lambda: (template_messages(messages), ToolChoice.of(tools, tool_choice))
        )
        if continue_final_message and checked_messages[-1]["role"] != "assistant":
            message = "continue_final_message needs a last message of the role assistant."
            raise RequestError(message, param="continue_final_message")
        if continue_final_message and add_generation_prompt:
            message = "add_generation_prompt and continue_final_message exclude each other."
            raise RequestError(message, param="add_generation_prompt")
        return Conversation(
            checked_messages,
            choice,
            not continue_final_message if add_generation_prompt is None else add_generation_prompt,
            continue_final_message,
            _template_kwargs(service.template_arguments, chat_template_kwargs, reasoning_effort, thinking),
            weight,
        )

    @property
    def forgoes_thinking(self) -> bool:
        """So the request says, or the server's defaults. Not every template passes that on to the model."""
        return any(self.template_kwargs.get(name) is False for name in _THINKING_KWARGS)

    async def render(self, service: GenerationService) -> list[int]:
        """The prompt's token ids."""
        render = functools.partial(
            service.apply_chat_template,
            self.messages,
            self.tools.shown or None,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            **self.template_kwargs,
        )
        is_small = all(map(_is_small, self.template_kwargs.values()))
        return await service.lanes.run(self.weight if is_small else LONG_CHARS, render)


def _weight(messages: list[dict[str, Any]], tools: list[dict[str, Any]], context_len: int) -> int:
    """Characters, and something for each message, part and tool. Refuses more of those than the context has tokens, before
    anything is done for each of them."""
    check_count("messages", len(messages), context_len)
    check_count("tools", len(tools), context_len)
    num_pieces, num_chars = len(messages) + len(tools), 0
    for message in messages:
        content, calls = message.get("content"), message.get("tool_calls")
        num_pieces += len(content) if isinstance(content, list) else 0
        num_pieces += len(calls) if isinstance(calls, list) else 0
        check_count("messages", num_pieces, context_len)
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
        num_chars += sum(len(text) for text in texts if isinstance(text, str))
    if tools:  # templates write them out whole, whatever they hold
        return LONG_CHARS
    return num_chars + num_pieces * CHARS_PER_PIECE


def check_count(field: str, count: int, context_len: int) -> None:
    """Raises RequestError for more than the context can have tokens for: before anything is done for each of them."""
    if count > context_len:
        holds = "messages, content parts and tool calls" if field == "messages" else "tools"
        raise RequestError(
            f"{field} holds at least {count} {holds}: the input is longer than the model's context length "
            f"({context_len} tokens).",
            param=field,
            code="context_length_exceeded",
        )


def _is_small(value: Any) -> bool:
    return not isinstance(value, list | dict) and (not isinstance(value, str) or len(value) <= INLINE_CHARS)


def _template_kwargs(
    arguments: TemplateArguments,
    given: dict[str, Any] | None,
    reasoning_effort: str | float | None,
    thinking: bool | None,
) -> dict[str, Any]:
    kwargs = dict(given or {})
    try:
        arguments.check(kwargs)
    except ValueError as error:
        raise RequestError(str(error), param="chat_template_kwargs") from None
    if reasoning_effort is not None:
        check_effort(reasoning_effort)
        kwargs.setdefault("reasoning_effort", reasoning_effort)
        thinking = reasoning_effort != "none"
    if thinking is not None:
        for name in _THINKING_KWARGS:
            kwargs.setdefault(name, thinking)
    return {**arguments.defaults, **kwargs}
