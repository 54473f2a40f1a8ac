"""/v1/completions/render and /v1/chat/completions/render: what a prompt is in tokens, for routers that know what is cached."""

from __future__ import annotations

from typing import Any

import pytest
from fake_service import FakeService
from http_harness import MODEL, app_client

MESSAGES = [{"role": "user", "content": "hi"}]
COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"


async def render(path: str, expect: int = 200, service: FakeService | None = None, **body: Any) -> Any:
    async with app_client(service or FakeService()) as client:
        reply = await client.post(path + "/render", json=body)
    assert reply.status_code == expect, reply.text
    return reply.json()


@pytest.mark.parametrize("prompt", ["hi", ["hi", "there"], [5, 6], [[5], [6, 7]]])
async def test_prompts_are_those_that_a_completion_computes(prompt: Any) -> None:
    service = FakeService()
    rendered = await render(COMPLETION, service=service, prompt=prompt, max_tokens=4, stream=True)
    assert service.requests == [], "nothing is generated"
    async with app_client(service) as client:
        assert (await client.post(COMPLETION, json={"prompt": prompt, "max_tokens": 1})).status_code == 200
    (request,) = service.requests
    assert [one["token_ids"] for one in rendered] == service._prompts(request)
    assert {one["model"] for one in rendered} == {MODEL}
    assert all(one["request_id"].startswith("cmpl-") for one in rendered)


async def test_a_conversation_is_rendered_as_a_chat_completion_renders_it() -> None:
    service = FakeService()
    body = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
    rendered = await render(CHAT, service=service, **body)
    assert service.requests == [], "nothing is generated"
    async with app_client(service) as client:
        assert (await client.post(CHAT, json=body)).status_code == 200
    assert service.requests[0].input_ids == [rendered["token_ids"]]
    assert rendered["model"] == MODEL
    assert rendered["request_id"].startswith("chatcmpl-")


async def test_what_llm_d_says_of_templates_asks_for_nothing() -> None:
    plain = await render(CHAT, messages=MESSAGES)
    same = await render(CHAT, messages=MESSAGES, add_generation_prompt=True, documents=[], chat_template="", tools=[])
    assert same["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt is not supported"),
        (CHAT, {"messages": MESSAGES, "spice": 1}, "spice is not a field"),
        (CHAT, {"messages": []}, "messages"),
        (COMPLETION, {"prompt": [[99999999]]}, "token id"),
        (COMPLETION, {"prompt": "x" * (2 * 1024 * 1024 + 1)}, "at most 2097152 characters"),
        (COMPLETION, {"prompt": "x", "temperature": -1}, "temperature"),
    ],
)
async def test_what_would_be_refused_is_refused(path: str, body: dict[str, Any], words: str) -> None:
    assert words in (await render(path, 400, **body))["message"]


async def test_another_model_is_404() -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), (COMPLETION, {"prompt": "x"})):
        assert "does not exist" in (await render(path, 404, model="other", **body))["message"]
