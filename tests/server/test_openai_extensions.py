"""SGLang's extensions that completions and chat completions share: hidden states, experts, sessions, labels."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from fake_service import FakeService
from http_harness import app_client, events_of

from jaxserve.server.requests import SessionParams

PATHS = {"/v1/completions": {"prompt": "hi"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]}}


async def choices_of(path: str, service: FakeService | None = None, **fields: Any) -> list[dict[str, Any]]:
    """Those of a whole reply, or of all events."""
    async with app_client(service or FakeService(), reasoning_parser="deepseek-r1") as client:
        reply = await client.post(path, json={**PATHS[path], **fields})
    assert reply.status_code == 200, reply.text
    if not fields.get("stream"):
        return reply.json()["choices"]  # type: ignore[no-any-return]
    return [choice for event in events_of(reply.text) for choice in event["choices"]]


# Of the fake model the third token's state is [3, 0.5], that of the prompt [1, 0.5].
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("asked", "max_tokens", "expected"),
    [(True, 3, [3.0, 0.5]), ("last", 3, [[3.0, 0.5]]), (True, 1, []), ("last", 1, [[1.0, 0.5]])],
)
async def test_choices_hold_the_last_hidden_state(path: str, asked: Any, max_tokens: int, expected: Any) -> None:
    service = FakeService()
    choices = await choices_of(path, service, return_hidden_states=asked, max_tokens=max_tokens, n=2)
    assert [choice["hidden_states"] for choice in choices] == [expected, expected]
    assert service.requests[0].options[0].return_hidden_states == "last", "the others are not asked for"


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_tells_it_behind_the_end_of_a_choice(path: str) -> None:
    choices = await choices_of(path, return_hidden_states=True, max_tokens=3, n=2, stream=True)
    holders = [choice.get("delta", choice) for choice in choices]
    shown = [holder.get("hidden_states") for holder in holders]
    assert [state for state in shown if state is not None] == [[3.0, 0.5]] * 2
    for index in (0, 1):
        mine = [(choice, state) for choice, state in zip(choices, shown, strict=True) if choice["index"] == index]
        assert mine[-1][1] is not None
        assert mine[-2][0]["finish_reason"] == "length"
        assert mine[-1][0]["finish_reason"] is None


@pytest.mark.parametrize("path", PATHS)
async def test_nobody_gets_hidden_states_unasked(path: str) -> None:
    for stream in (False, True):
        for choice in await choices_of(path, return_hidden_states=False, stream=stream):
            assert "hidden_states" not in choice
            assert "hidden_states" not in choice.get("delta", {})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_the_experts_of_the_first_choice(path: str, stream: bool) -> None:
    service = FakeService()
    asked = {"return_routed_experts": True, "routed_experts_start_len": 1, "return_cached_tokens_details": True}
    body = {**PATHS[path], **asked, "max_tokens": 3, "n": 2, "stream": stream}
    async with app_client(service) as client:
        reply = await client.post(path, json=body)
        unasked = await client.post(path, json={**PATHS[path], "stream": stream})
    (told,) = [event["sglext"] for event in (events_of(reply.text) if stream else [reply.json()]) if "sglext" in event]
    experts = np.frombuffer(base64.b64decode(told.pop("routed_experts")), "<i4").reshape(3, 2, 3)
    assert experts[:, 0, 0].tolist() == [1, 2, 3]
    assert told == {"cached_tokens_details": {"device": 3, "host": 0}}
    assert service.requests[0].options[0].routed_experts_start_len == 1
    assert "sglext" not in unasked.text


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_is_a_turn_of_a_session(path: str) -> None:
    service = FakeService()
    await choices_of(path, service, session_params={"id": "s", "rid": "before"})
    assert service.requests[0].options[0].session_params == SessionParams(id="s", rid="before")


@pytest.mark.parametrize("path", PATHS)
async def test_hints_for_sglangs_caches_and_labels_change_nothing(path: str) -> None:
    plain = await choices_of(path)
    assert await choices_of(path, session_id="s", custom_labels={"a": "b"}) == plain
