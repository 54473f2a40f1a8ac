"""What of a request reaches the chat template: no argument of ours, and nothing that ends in a server error."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from fake_service import FakeService
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from jaxserve.config import ServerArgs
from jaxserve.server.chat_templates import TemplateArguments
from jaxserve.server.openai.conversation import Conversation
from jaxserve.server.pipeline import Pipeline
from jaxserve.server.requests import RequestError
from jaxserve.server.tokenizer_manager import TokenizerManager

HELLO = [{"role": "user", "content": "hello"}]
THE_TEMPLATES = {"documents", "kwargs"}


async def rendered(pipeline: Pipeline, messages: list[dict[str, Any]], kwargs: dict[str, Any] | None = None) -> list[int]:
    conversation = await Conversation.checked(pipeline.manager, messages, chat_template_kwargs=kwargs)
    return await conversation.render(pipeline.manager)


@pytest.mark.parametrize(
    "function", [PreTrainedTokenizerBase.apply_chat_template, render_jinja_template, TokenizerManager.apply_chat_template]
)
async def test_no_argument_of_ours_can_be_given(function: Any) -> None:
    """Also not one that a newer transformers brings."""
    for name in inspect.signature(function).parameters.keys() - THE_TEMPLATES:
        with pytest.raises(RequestError, match="chat_template_kwargs must not hold"):
            await Conversation.checked(FakeService(), HELLO, chat_template_kwargs={name: 1})


def deep(levels: int = 100_000) -> Any:
    """More than any Python writes; how many that is depends on its version."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("kwargs", [{"documents": 5}, {"documents": deep()}, {"bos_token": deep()}])
async def test_what_a_template_raises_is_the_clients(pipeline: Pipeline, kwargs: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="chat template cannot render") as caught:
        await rendered(pipeline, HELLO, kwargs)
    assert caught.value.status_code == 400


async def test_a_request_brings_a_template_where_it_may(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"chat_template": "{{ messages[0].content }}, {{ tone }} {{ enable_thinking }}", "tone": "softly"}
    with pytest.raises(RequestError, match="must not hold chat_template: this server runs without --trust-request"):
        await rendered(pipeline, HELLO, mine)
    args = ServerArgs(trust_request_chat_template=True, default_chat_template_kwargs='{"tone": "loudly", "enable_thinking": 5}')
    monkeypatch.setattr(pipeline.manager, "template_arguments", TemplateArguments.of(args))
    said = HELLO[0]["content"]
    assert pipeline.manager.decode(await rendered(pipeline, HELLO, mine)) == f"{said}, softly 5"
    del mine["tone"]
    assert pipeline.manager.decode(await rendered(pipeline, HELLO, mine)) == f"{said}, loudly 5"
    for wrong in ("{{", "{{ raise_exception('no') }}", "{{ messages.__class__.__mro__ }}{{ x.y.z }}"):
        with pytest.raises(RequestError, match="chat template cannot render") as caught:
            await rendered(pipeline, HELLO, {"chat_template": wrong})
        assert caught.value.status_code == 400
    with pytest.raises(RequestError, match=r"chat_template_kwargs\.chat_template must be a string"):
        await rendered(pipeline, HELLO, {"chat_template": ["x"]})


async def test_what_a_request_says_of_thinking_stands_before_the_servers_default() -> None:
    service = FakeService()
    service.template_arguments = TemplateArguments({"enable_thinking": True, "tone": "x"})
    conversation = await Conversation.checked(service, HELLO, reasoning_effort="none")
    assert (conversation.template_kwargs["enable_thinking"], conversation.template_kwargs["tone"]) == (False, "x")


def test_defaults_for_templates_are_checked_at_the_start() -> None:
    with pytest.raises(ValueError, match="--default-chat-template-kwargs must be a JSON object"):
        ServerArgs(default_chat_template_kwargs="[]")
    with pytest.raises(ValueError, match="--default-chat-template-kwargs must not hold chat_template, tools"):
        TemplateArguments.of(ServerArgs(default_chat_template_kwargs='{"tools": [], "chat_template": ""}'))


@pytest.mark.parametrize("name", ["", "a b", "namespace", "raise_exception", "kwargs", "x" * 10_000])
async def test_any_other_name_reaches_the_template(pipeline: Pipeline, name: str) -> None:
    assert await rendered(pipeline, HELLO, {name: 1})


NO_OBJECTS = (r'{"a": "\ud800"}', '{"a": NaN}', '{"a": 1e999}', "{", "[" * 5000, '{"a": ' + "9" * 5000 + "}")


@pytest.mark.parametrize("arguments", NO_OBJECTS)
async def test_arguments_of_calls_that_are_no_json(pipeline: Pipeline, arguments: str) -> None:
    """They were a model's: they are handed back as the text they are."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert arguments[:10] in pipeline.manager.decode(await rendered(pipeline, [*HELLO, message, *HELLO]), False)
