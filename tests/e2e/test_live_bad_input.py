"""Bad input to a live server: a sentence with field, value and limit, the right status, and nothing lost."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from live_server import LiveServer


def message_of(reply: httpx.Response) -> str:
    body = reply.json()
    return body["error"]["message"] if "error" in body else body["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "text"),
        ({"text": ""}, "empty"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"text": 5}, "text"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [1, 99_999]}, "99999"),
        ({"input_ids": [-1]}, "-1"),
        ({"input_ids": [1] * 3000}, "2048"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature must be"),
        ({"text": "a", "sampling_params": {"top_p": 0}}, "top_p must be in (0, 1]"),
        ({"text": "a", "sampling_params": {"top_k": 0}}, "top_k"),
        ({"text": "a", "sampling_params": {"max_new_tokens": "many"}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 5000}}, "5000"),
        ({"text": "a", "sampling_params": {"stop": ["x"] * 33}}, "stop may hold at most 32"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [70_000]}}, "70000"),
        ({"text": "a", "sampling_params": {"no_such_parameter": 1}}, "no_such_parameter"),
        ({"text": "a", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}}, "min_new_tokens"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 1000}, "top_logprobs_num"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ],
    ids=str,
)
def test_generate_answers_400_with_a_sentence(demo_server: LiveServer, body: dict[str, Any], says: str) -> None:
    reply = demo_server.post("/generate", body)
    assert reply.status_code == 400, reply.text
    assert says in message_of(reply)
    assert demo_server.generate(text="hi", sampling_params={"max_new_tokens": 1})["meta_info"]["completion_tokens"] == 1


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("content", [b"{", b"", b"[1, 2]", b"\xff\xfe"])
def test_broken_json_is_400(demo_server: LiveServer, path: str, content: bytes) -> None:
    reply = httpx.post(demo_server.url + path, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert message_of(reply)


def test_unknown_paths_and_methods(demo_server: LiveServer) -> None:
    assert demo_server.get("/no/such/path").status_code == 404
    assert demo_server.get("/generate").status_code == 405


def test_all_of_a_batch_is_refused_if_one_is_bad(demo_server: LiveServer) -> None:
    reply = demo_server.post("/generate", {"input_ids": [[1, 2], [1, 99_999]]})
    assert reply.status_code == 400
    demo_server.assert_whole()


def test_a_rid_in_use_is_refused(demo_server: LiveServer) -> None:
    reply = demo_server.post("/generate", {"text": ["a", "b"], "rid": ["same", "same"]})
    assert reply.status_code == 400
    assert "same" in message_of(reply)


def test_nothing_was_lost(demo_server: LiveServer) -> None:
    demo_server.assert_whole()
