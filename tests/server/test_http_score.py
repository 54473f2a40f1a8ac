"""POST /v1/score: what it asks the model, and what it makes of the answers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fake_service import FakeService
from http_harness import app_client


async def ask(service: FakeService | None = None, **body: Any) -> Any:
    body = {"query": "ab", "items": ["x", "yz"], "label_token_ids": [5, 6]} | body
    async with app_client(service or FakeService()) as client:
        return await client.post("/v1/score", json=body)


async def test_probabilities_of_the_labels() -> None:
    reply = (await ask()).json()
    assert reply["scores"] == [pytest.approx([math.exp(-2.0)] * 2)] * 2
    assert reply["usage"] == {"prompt_tokens": 4 + 5, "completion_tokens": 0, "total_tokens": 9}
    assert (await ask(apply_softmax=True)).json()["scores"] == [[0.5, 0.5]] * 2


async def test_what_the_model_is_asked() -> None:
    service = FakeService()
    for body, prompts, ids in (
        ({}, ["abx", "abyz"], None),
        ({"item_first": True}, ["xab", "yzab"], None),
        ({"items": "x"}, ["abx"], None),
        ({"query": [1, 2], "items": [[3], []]}, None, [[1, 2, 3], [1, 2]]),
    ):
        assert (await ask(service, **body)).status_code == 200
        request = service.requests[-1]
        assert (request.prompts, request.input_ids) == (prompts, ids)
        assert request.options[0].token_ids_logprob == (5, 6)
    assert (await ask(service, items=[])).json()["scores"] == []


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"label_token_ids": []}, "label_token_ids", "at least one token"),
        ({"items": [[1]]}, "items", "texts if the query is one"),
        ({"items": ["x", [1]]}, "items", "texts if the query is one"),
        ({"query": [1]}, "items", "else lists of token ids"),
        ({"query": None}, "query", "query"),
        ({"model": "other"}, "model", "does not exist"),
        ({"query_embed_overrides": [[0.5]]}, "query_embed_overrides", "not supported"),
        ({"labels": [1]}, "labels", "not a field"),
    ],
)
async def test_bad_requests(body: dict[str, Any], param: str, words: str) -> None:
    reply = await ask(**body)
    error = reply.json()["error"]
    assert reply.status_code in (400, 404) and error["param"] == param and words in error["message"], reply.text
