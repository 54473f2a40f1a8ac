"""POST /v1/embeddings, /encode and /classify: fields, forms of replies, their order, and errors in each protocol's envelope."""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fake_service import LIMITS, FakeService
from http_harness import app_client, error_message, live_server

from jaxserve.runner import Vectors
from jaxserve.types import FinishReason

EMBEDDING = Vectors(size=3, gives="embedding", normalizes=True)
RAW = dataclasses.replace(EMBEDDING, normalizes=False)
REWARD = Vectors(size=1, gives="scores")


def serving(vectors: Vectors | None = RAW, **limits: Any) -> FakeService:
    service = FakeService()
    service.limits = dataclasses.replace(LIMITS, vectors=vectors, **limits)
    return service


async def post(path: str, body: dict[str, Any], service: FakeService | None = None, **options: Any) -> httpx.Response:
    async with app_client(service or serving(), **options) as client:
        return await client.post(path, json=body)


async def test_a_reply() -> None:
    reply = await post("/v1/embeddings", {"input": ["ab", "abc"], "model": "default"})
    assert reply.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [3.0, 97.0, 98.0]},
            {"object": "embedding", "index": 1, "embedding": [4.0, 97.0, 99.0]},
        ],
        "model": "/models/tiny",
        "usage": {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0},
    }


@pytest.mark.parametrize(
    ("given", "texts", "ids"),
    [
        ("ab", ["ab"], None),
        (["ab", "c"], ["ab", "c"], None),
        ([5, 6], None, [[5, 6]]),
        ([[5, 6], [7, 8]], None, [[5, 6], [7, 8]]),
    ],
)
async def test_every_form_of_input(given: Any, texts: Any, ids: Any) -> None:
    service = serving()
    body = {"input": given, "rid": "r", "priority": 3, "user": "me", "truncate_prompt_tokens": 4, "lora_path": "sql"}
    assert (await post("/v1/embeddings", body, service)).status_code == 200
    (req,) = service.requests
    assert (req.prompts, req.input_ids, req.pools, req.truncate_prompt_tokens) == (texts, ids, True, 4)
    assert {(o.priority, o.lora_path) for o in req.options} == {(3, "sql")} and len(req.options) == req.num_prompts
    assert req.rids == (["r"] if req.num_prompts == 1 else ["r_0", "r_1"])
    assert {params.max_new_tokens for params in req.sampling_params} == {0}


async def test_an_adapter_as_model() -> None:
    service = serving()
    service.lora_adapters = {"sql": "/adapters/sql"}
    reply = await post("/v1/embeddings", {"input": "a", "model": "default:sql"}, service)
    assert reply.json()["model"] == "default:sql" and service.requests[0].options[0].lora_path == "sql"
    assert (await post("/v1/embeddings", {"input": "a", "model": "other"}, service)).status_code == 404


async def test_dimensions_are_cut_and_then_normalized() -> None:
    service = serving(EMBEDDING)
    service.vectors_of = lambda ids: [3.0, 4.0, 12.0]
    for dimensions, expected in ((None, [3 / 13, 4 / 13, 12 / 13]), (2, [0.6, 0.8]), (3, [3 / 13, 4 / 13, 12 / 13])):
        for path, field in (("/v1/embeddings", "input"), ("/encode", "text")):
            reply = (await post(path, {field: "a", "dimensions": dimensions}, service)).json()
            vector = reply["data"][0]["embedding"] if field == "input" else reply["embedding"]
            assert vector == pytest.approx(expected, rel=1e-6)


async def test_base64_holds_little_endian_float32() -> None:
    body = {"input": ["ab", "abc"], "encoding_format": "base64"}
    data = (await post("/v1/embeddings", body)).json()["data"]
    vectors = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist() for one in data]
    assert vectors == [[3.0, 97.0, 98.0], [4.0, 97.0, 99.0]]


async def test_openais_client() -> None:
    """It asks for base64 unless it is told not to."""
    async with (
        live_server(serving()) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        for fields in ({}, {"encoding_format": "float"}):
            reply = await client.embeddings.create(model="default", input=["ab", "abc"], **fields)  # type: ignore[arg-type]
            assert [one.embedding for one in reply.data] == [[3.0, 97.0, 98.0], [4.0, 97.0, 99.0]]
            assert reply.usage.total_tokens == 7
        with pytest.raises(openai.BadRequestError, match=r"dimensions must be in \[1, 3\].* got 9"):
            await client.embeddings.create(model="default", input="a", dimensions=9)


async def test_thousands_in_one_request() -> None:
    service = serving(dataclasses.replace(RAW, size=64))
    service.vectors_of = lambda ids: [float(ids[0])] * 64
    body = {"input": [[i % 900] for i in range(4096)]}
    data = (await post("/v1/embeddings", body, service)).json()["data"]
    assert [one["embedding"][63] for one in data] == [float(i % 900) for i in range(4096)]
    assert service.asked_for == [(4096, 1)] and len(service.requests) == 1


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "a string, a list of strings"),
        ({"input": ["a", 1]}, "input", "must not mix"),
        ({}, "input", "input is required"),
        ({"input": {"a": 1}}, "input", "must be a string or a list"),
        (
            {"input": "a", "dimensions": 0},
            "dimensions",
            "dimensions must be in [1, 3], the size of the model's embeddings, got 0",
        ),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format"),
        ({"input": "a", "embed_overrides": [[0.5]]}, "embed_overrides", "not supported"),
        ({"input": "a", "stream": True}, "stream", "not a field"),
        ({"input": ["a", "b"], "lora_path": ["x"]}, "lora_path", "one entry per prompt"),
    ],
)
async def test_bad_requests(body: dict[str, Any], param: str, words: str) -> None:
    reply = await post("/v1/embeddings", body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and words in error["message"], reply.text


async def test_what_the_model_does_not_make() -> None:
    scores = serving(dataclasses.replace(REWARD, activation="sigmoid"), generates=False)
    reply = await post("/v1/embeddings", {"input": "a"}, scores)
    assert reply.status_code == 400
    assert error_message(reply) == "This server's model gives no embeddings: it scores texts (POST /classify, /rerank)."
    reply = await post("/classify", {"text": "a"})
    assert error_message(reply) == "This server's model gives no scores: it makes embeddings of texts (POST /v1/embeddings)."
    reply = await post("/encode", {"text": "a"}, serving(None))
    assert error_message(reply) == "This server makes no vectors of texts: its model generates."
    reply = await post("/classify", {"text": "a", "dimensions": 1}, scores)
    assert error_message(reply) == "dimensions is of embeddings, and this server's model gives scores."
    reply = await post("/v1/embeddings", {"input": "a"}, serving(dataclasses.replace(RAW, of_tokens=True)))
    assert "a vector of each token" in error_message(reply)


async def test_failures_reach_the_client() -> None:
    service = serving()
    service.fail_after = (0, FinishReason.abort("The queue is full.", 503, "ServiceUnavailableError"))
    reply = await post("/v1/embeddings", {"input": "a"}, service)
    assert reply.status_code == 503 and error_message(reply) == "The queue is full."
    service.fail_after = (0, FinishReason.abort("The request was aborted."))
    reply = await post("/encode", {"text": "a"}, service)
    assert reply.status_code == 400 and error_message(reply) == "The request was aborted."


# --- the native routes


async def test_encode() -> None:
    reply = (await post("/encode", {"text": "ab", "rid": "r"})).json()
    assert reply["embedding"] == [3.0, 97.0, 98.0]
    assert reply["meta_info"]["id"] == "r" and reply["meta_info"]["prompt_tokens"] == 3
    replies = (await post("/encode", {"input_ids": [[5, 6], [7, 8]], "rid": "r"})).json()
    assert [one["embedding"] for one in replies] == [[2.0, 6.0, 6.0], [2.0, 8.0, 8.0]]
    assert [one["meta_info"]["id"] for one in replies] == ["r_0", "r_1"]


async def test_rewards_as_they_are() -> None:
    service = serving(REWARD)
    service.vectors_of = lambda ids: [-0.5 * len(ids)]
    for path in ("/classify", "/encode"):
        replies = (await post(path, {"text": ["ab", "abc"]}, service)).json()
        assert [one["embedding"] for one in replies] == [[-1.5], [-2.0]]


async def test_pairs_and_scores_of_tokens() -> None:
    service = serving(Vectors(size=2, gives="token_scores", of_tokens=True))
    service.vectors_of = lambda ids: [[token, 0.5] for token in ids]
    reply = (await post("/classify", {"text": [["a", "b"]], "is_cross_encoder_request": True}, service)).json()
    assert reply[0]["embedding"] == [[1.0, 0.5], [97.0, 0.5], [1.0, 0.5], [98.0, 0.5]]
    assert service.requests[0].pairs == [("a", "b")]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "Exactly one of text and input_ids must be given."),
        ({"text": "a", "input_ids": [1]}, "Exactly one of text and input_ids must be given."),
        ({"text": 5}, "text must be a string or a list or null"),
        ({"text": ["a", ["b", "c"]]}, "text must hold pairs, each a list of two texts."),
        ({"text": [["a"]]}, "text must hold pairs"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"text": "a", "image_data": "x"}, "image_data is not supported yet."),
        ({"text": "a", "stream": True}, "stream is not a field this server knows."),
        ({"text": ["a", "b"], "lora_path": ["x"]}, "lora_path must have one entry per prompt: got 1 for 2 prompts."),
        ({"text": []}, "no prompt"),
    ],
)
async def test_bad_native_requests(body: dict[str, Any], words: str) -> None:
    reply = await post("/encode", body)
    assert reply.status_code == 400 and words in error_message(reply), reply.text


# --- routes that generate, at a model that does not


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"model": "default", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}),
        ("/api/chat", {"model": "default", "messages": [{"role": "user", "content": "a"}]}),
        ("/api/generate", {"model": "default", "prompt": "a"}),
    ],
)
async def test_nothing_is_generated(path: str, body: dict[str, Any], stream: bool) -> None:
    reply = await post(path, {**body, "stream": stream}, serving(generates=False))
    assert reply.status_code == 400, reply.text
    words = "This server's model does not generate text: it makes embeddings of texts (POST /v1/embeddings)."
    assert error_message(reply) == words


async def test_what_the_model_is_for_is_told() -> None:
    service = serving(EMBEDDING, generates=False)
    async with app_client(service) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
        shown = (await client.post("/api/show", json={"model": "default"})).json()
        service.limits = dataclasses.replace(LIMITS, vectors=dataclasses.replace(REWARD, labels=("good",)), generates=False)
        scores = (await client.get("/v1/models/default")).json()
        service.limits = LIMITS
        plain = (await client.get("/v1/models/default")).json()
    assert card["is_generation"] is False and card["vectors"] == {"gives": "embedding", "size": 3, "normalized": True}
    assert shown["capabilities"] == ["embedding"]
    assert scores["vectors"] == {"gives": "scores", "labels": ["good"], "activation": "none"}
    assert plain["is_generation"] is True and plain["vectors"] is None
