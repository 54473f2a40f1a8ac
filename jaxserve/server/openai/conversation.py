"""A conversation and all that shapes its prompt: what chat completions and /tokenize hand to the model's chat template."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import Any

from jaxserve.server.http.service import GenerationService
from jaxserve.server.openai.messages import template_messages, template_tools
from jaxserve.server.requests import RequestError

# A conversation up to this length is rendered and tokenized on the loop, which is faster than waking a thread; a longer one
# takes milliseconds that other streams should not wait for.
INLINE_RENDER_CHARS = 2000

# Arguments of the functions between here and the template that are the server's business; all other names reach the template.
_OWN_TEMPLATE_KWARGS = frozenset(
    ("self", "messages", "conversation", "conversations", "tools", "add_generation_prompt", "continue_final_message",
     "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
     "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "sanitize_control_tokens")
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Made by `checked`: messages, tools and arguments are what the template takes."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]

    @staticmethod
    def checked(
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        reasoning_effort: str | float | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Conversation:
        """From a request's fields; raises RequestError."""
        checked_messages = template_messages(messages)
        if continue_final_message and checked_messages[-1]["role"] != "assistant":
            message = "continue_final_message needs a last message of the role assistant."
            raise RequestError(message, param="continue_final_message")
        if continue_final_message and add_generation_prompt:
            message = "add_generation_prompt and continue_final_message exclude each other."
            raise RequestError(message, param="add_generation_prompt")
        return Conversation(
            checked_messages,
            template_tools(tools, tool_choice),
            not continue_final_message if add_generation_prompt is None else add_generation_prompt,
            continue_final_message,
            _template_kwargs(chat_template_kwargs, reasoning_effort),
        )

    async def render(self, service: GenerationService) -> list[int]:
        """The prompt's token ids."""
        render = functools.partial(
            service.apply_chat_template,
            self.messages,
            self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            **self.template_kwargs,
        )
        is_short = sum(len(message["content"]) for message in self.messages) <= INLINE_RENDER_CHARS
        if is_short and self.tools is None and all(map(_is_small, self.template_kwargs.values())):
            return render()
        return await asyncio.to_thread(render)


def _is_small(value: Any) -> bool:
    return not isinstance(value, list | dict) and (not isinstance(value, str) or len(value) <= INLINE_RENDER_CHARS)


def _template_kwargs(given: dict[str, Any] | None, reasoning_effort: str | float | None) -> dict[str, Any]:
    kwargs = dict(given or {})
    if refused := _OWN_TEMPLATE_KWARGS & kwargs.keys():
        raise RequestError(f"chat_template_kwargs must not hold {', '.join(sorted(refused))}.", param="chat_template_kwargs")
    if reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", reasoning_effort)
    return kwargs
