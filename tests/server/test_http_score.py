"""POST /v1/score: what it asks the model, and what it makes of the answers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fake_service import FakeService
from http_harness import app_client

from jaxserve.server.requests import RequestError


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
        assert request.options[-1] is request.options[0]  # so it is checked once
    assert (await ask(service, items=[])).json()["scores"] == []


def with_logprobs() -> FakeService:
    service = FakeService()
    service.logprob_of = lambda token: -token / 2
    return service


async def test_a_temperature_divides_the_labels_logits() -> None:
    for temperature, gap in ((2, 0.25), (0.5, 1.0), (1.0, 0.5)):
        reply = (await ask(with_logprobs(), apply_softmax=True, temperature=temperature)).json()
        assert reply["scores"] == [pytest.approx([1 / (1 + math.exp(-gap)), 1 / (1 + math.exp(gap))])] * 2
    assert (await ask(with_logprobs(), apply_softmax=True, temperature=1e-310)).json()["scores"] == [[1, 0]] * 2
    assert (await ask(temperature=1.0)).json()["scores"] == [pytest.approx([math.exp(-2.0)] * 2)] * 2


async def test_logprobs_of_the_labels() -> None:
    assert "token_logprobs" not in (await ask()).json()
    for changed in ({}, {"apply_softmax": True, "temperature": 3}):
        reply = (await ask(with_logprobs(), return_token_logprobs=True, **changed)).json()
        assert reply["token_logprobs"] == [[-2.5, -3.0]] * 2
    assert (await ask(items=[], return_token_logprobs=True)).json()["token_logprobs"] == []


async def test_labels_for_each_item() -> None:
    service, labels = with_logprobs(), [[5, 6, 7], [4], [5, 6, 7]]
    reply = (await ask(service, items=["x", "y", "z"], label_token_ids=labels, return_token_logprobs=True)).json()
    options = service.requests[-1].options
    assert [one.token_ids_logprob for one in options] == [(5, 6, 7), (4,), (5, 6, 7)]
    assert reply["token_logprobs"] == [[-token / 2 for token in ids] for ids in labels]
    assert reply["scores"] == [pytest.approx([math.exp(-token / 2) for token in ids]) for ids in labels]
    alone = (await ask(service, items="x", label_token_ids=[[4, 5]], apply_softmax=True)).json()
    assert alone["scores"] == [pytest.approx([1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(0.5))])]


async def test_errors_name_the_labels() -> None:
    service = FakeService()
    service.crash = RequestError("token_ids_logprob holds an out-of-vocabulary token id: 9.", param="token_ids_logprob")
    error = (await ask(service, label_token_ids=[[9], [5]])).json()["error"]
    assert (error["param"], error["message"]) == ("label_token_ids", "label_token_ids holds an out-of-vocabulary token id: 9.")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"label_token_ids": []}, "label_token_ids", "at least one token"),
        ({"label_token_ids": [[5], []]}, "label_token_ids", "at least one token for each item"),
        ({"label_token_ids": [[5]]}, "label_token_ids", "one list per item: got 1 for 2 items."),
        ({"label_token_ids": [[5]], "items": []}, "label_token_ids", "one list per item: got 1 for 0 items."),
        ({"label_token_ids": [5, [6]]}, "label_token_ids", "must not mix token ids and lists"),
        ({"temperature": 0, "apply_softmax": True}, "temperature", "must be above 0 and finite, got 0.0."),
        ({"temperature": -1.5, "apply_softmax": True}, "temperature", "must be above 0 and finite, got -1.5."),
        ({"temperature": 0.5}, "temperature", "temperature needs apply_softmax: true."),
        ({"temperature": "hot"}, "temperature", "temperature"),
        ({"return_token_logprobs": 1}, "return_token_logprobs", "return_token_logprobs"),
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
